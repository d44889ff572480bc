package once

import (
	"fmt"
	"testing"
)

func TestTexts(t *testing.T) {
	var texts Texts
	if !texts.First("a") || texts.First("a") || !texts.First("b") {
		t.Error("a text is not said exactly once")
	}
	for i := range 10 * Most {
		if text := fmt.Sprint(i); !texts.First(text) || texts.First(text) {
			t.Fatalf("%s is not said exactly once", text)
		}
		if len(texts.said) > Most {
			t.Fatalf("%d texts are remembered", len(texts.said))
		}
	}
}
