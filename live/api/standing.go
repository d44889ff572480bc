package api

import (
	"fmt"
	"strings"
	"time"
)

// Standing is what keeps new connections off an endpoint now, or has it get fewer of them.
type Standing struct {
	Open    int      `json:"open,omitempty"` // connections of this node
	Full    bool     `json:"full,omitempty"` // they are as many as it may have
	Ejected *Ejected `json:"ejected,omitempty"`
	// Share is the part of its full share that it has while it starts slowly, below 1.
	Share float64 `json:"share,omitempty"`
}

// Ejected says since when new connections pass an endpoint over that kept failing, and until
// when. If Tried is set, one of them tries it, and it is back if that goes well until then.
type Ejected struct {
	Since time.Time `json:"since"`
	Until time.Time `json:"until"`
	Tried bool      `json:"tried,omitempty"`
	Why   string    `json:"why"` // failed attempts, or resets
}

// Words say it for people; empty if nothing keeps connections off the endpoint.
func (s *Standing) Words() string {
	var words []string
	if e := s.Ejected; e != nil {
		what := "ejected"
		if e.Tried {
			what = "tried again"
		}
		words = append(words, fmt.Sprintf("%s after %s, since %s until %s", what, e.Why, e.Since.Local().Format(time.TimeOnly), e.Until.Local().Format(time.TimeOnly)))
	}
	if s.Share > 0 {
		words = append(words, fmt.Sprintf("starts slowly, with %.0f %% of its share", 100*s.Share))
	}
	if s.Full {
		words = append(words, fmt.Sprintf("full, with %d connections", s.Open))
	}
	return strings.Join(words, ", ")
}
