package conntrack

import (
	"context"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
)

// A walk that has used its time pauses four times as long before the next one has the
// turn; one that has not does not.
func TestWalksRest(t *testing.T) {
	turn := turn{held: make(chan struct{}, 1)}
	step := func(took time.Duration) time.Duration {
		must.OK(t, turn.take(context.Background()))
		began := time.Now()
		turn.giveBack(context.Background(), took)
		return time.Since(began)
	}
	if rest := step(time.Millisecond); rest < 4*time.Millisecond {
		t.Errorf("the pause after 1 ms of steps is %s", rest)
	}
	step(stepsTime - 1)
	if turn.used != stepsTime-1 {
		t.Errorf("%s are used, want %s", turn.used, stepsTime-1)
	}
	turn.held <- struct{}{} // another walk has it
	ctx, stop := context.WithCancel(context.Background())
	stop()
	if turn.take(ctx) == nil {
		t.Error("two walks have the turn")
	}
}
