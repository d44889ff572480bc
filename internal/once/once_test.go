package once

import (
	"fmt"
	"testing"
	"time"
)

func TestLog(t *testing.T) {
	var texts Log
	if !texts.first("a") || texts.first("a") || !texts.first("b") {
		t.Error("a text is not said exactly once")
	}
	for i := range 10 * Most {
		if text := fmt.Sprint(i); !texts.first(text) || texts.first(text) {
			t.Fatalf("%s is not said exactly once", text)
		}
		if len(texts.said) > Most {
			t.Fatalf("%d texts are remembered", len(texts.said))
		}
	}
}

func TestLines(t *testing.T) {
	var lines Lines
	now := time.Now()
	for i := range 3 * PerMinute {
		last, ok := lines.Take("loud", now)
		if ok != (i < PerMinute) || last != (i == PerMinute-1) {
			t.Fatalf("line %d: last %v, allowed %v", i, last, ok)
		}
	}
	if _, ok := lines.Take("quiet", now); !ok {
		t.Error("another subject has no line")
	}
	if _, ok := lines.Take("loud", now.Add(time.Minute)); !ok {
		t.Error("there is no line in the next minute")
	}
	for i := range 2 * Most {
		if lines.Take(fmt.Sprint(i), now); len(lines.said) > Most {
			t.Fatalf("%d subjects are remembered", len(lines.said))
		}
	}
}

func TestTrouble(t *testing.T) {
	var trouble Trouble
	if trouble.Over() || trouble.Lasts() {
		t.Error("there is trouble at first")
	}
	for _, step := range []struct {
		text string
		want bool
	}{{"a", true}, {"a", false}, {"b", true}, {"a", true}} {
		if got := trouble.New(step.text); got != step.want || !trouble.Lasts() {
			t.Errorf("%s: new %v, want %v", step.text, got, step.want)
		}
	}
	if !trouble.Over() || trouble.Over() || trouble.Lasts() {
		t.Error("the trouble is not over once")
	}
}
