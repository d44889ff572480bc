package filter

import (
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// MaxSuggestions bounds the suggestions of Complete.
const MaxSuggestions = 100

// Complete suggests how the word before the byte at of a filter may go on. values
// returns what is known of a field without a fixed set of values, such as the names of
// services; it may be nil.
func Complete(text string, at int, values func(field string) []string) api.Completions {
	found := api.Completions{Suggestions: []api.Suggestion{}}
	at = min(max(at, 0), len(text))
	found.Start = strings.LastIndexAny(text[:at], blanks) + 1
	name, op, value := cutOperator(text[found.Start:at])
	if op == "" {
		found.Suggestions = append(found.Suggestions, completeField(value)...)
		return found
	}
	f := fields[name]
	if f == nil {
		found.Start = at
		return found
	}
	found.Start = at - len(value) + strings.LastIndexByte(value, ',') + 1
	typed := strings.ToLower(text[found.Start:at])
	all := slices.Clone(f.values)
	if all == nil && values != nil {
		all = values(name)
	}
	slices.Sort(all)
	for _, v := range slices.Compact(all) {
		if len(found.Suggestions) < MaxSuggestions && isPlain(v) && strings.HasPrefix(strings.ToLower(v), typed) {
			found.Suggestions = append(found.Suggestions, api.Suggestion{Text: v})
		}
	}
	return found
}

// isPlain reports whether a value needs no quotes and is safe to show: a terminal shows
// what is suggested. API servers accept few other names.
func isPlain(v string) bool {
	return !strings.ContainsAny(v, blanks+`",=<>!`) && printable.Text(v) == v
}

// completeField suggests fields with the operator that is used most.
func completeField(word string) (suggestions []api.Suggestion) {
	for _, name := range Fields() {
		if !strings.HasPrefix(name, strings.ToLower(word)) {
			continue
		}
		f := fields[name]
		op := "="
		if f.order {
			op = ">"
		}
		suggestions = append(suggestions, api.Suggestion{Text: name + op, About: f.about})
	}
	return suggestions
}
