package main

import (
	"context"
	"errors"
	"slices"
	"testing"
)

// top asks again when the proxy has ended, until the user leaves it or asks for something
// else.
func TestTopKeepsOn(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	var told []string
	calls := 0
	keepOn(ctx, 0, func() error {
		switch calls++; calls {
		case 1:
			return errors.New("the proxy has ended")
		case 3:
			stop()
		}
		return nil
	}, func(err error) { told = append(told, err.Error()) })
	if calls != 3 || !slices.Equal(told, []string{"the proxy has ended"}) {
		t.Errorf("%d streams; told %q", calls, told)
	}
}
