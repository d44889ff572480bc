package service

import (
	"cmp"
	"maps"
	"slices"
)

// setProblems replaces the problems of an object.
func (s *Store) setProblems(k ObjectKey, texts []string, u *update) {
	old := s.problems[k]
	if slices.EqualFunc(old, texts, func(p Problem, t string) bool { return p.Text == t }) {
		return
	}
	u.problems = true
	if len(texts) == 0 {
		delete(s.problems, k)
		return
	}
	list := make([]Problem, len(texts))
	for i, t := range texts {
		list[i] = Problem{Object: k.String(), Text: t}
	}
	s.problems[k] = list
}

// sortedProblems returns the problems of all objects, by kind and name.
func (s *Store) sortedProblems() []Problem {
	keys := slices.SortedFunc(maps.Keys(s.problems), func(a, b ObjectKey) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Name.Compare(b.Name))
	})
	var out []Problem
	for _, k := range keys {
		out = append(out, s.problems[k]...)
	}
	return out
}
