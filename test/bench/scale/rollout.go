package scale

import (
	"fmt"
	"regexp"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/procstat"
)

// Rollout is what a proxy does while all Services' pods are replaced.
type Rollout struct {
	Rate  float64          // changed slices a second, as they were sent
	Lag   [2]time.Duration // median and worst, from a change among them until a connection follows it; a minute at most
	Cores float64          // the proxy's CPU time for each second
}

// rollout replaces one pod after the other, rate a second in all Services but the last, for a
// time. Meanwhile it changes the last one's endpoint again and again, and awaits each.
func (u *run) rollout(rate int, length time.Duration) (r Rollout, err error) {
	pids := []int{u.proxy.PID()}
	before, err := procstat.CPU(pids)
	if err != nil {
		return r, err
	}
	begin, stop, sent := time.Now(), make(chan struct{}), make(chan error, 1)
	count := 0
	go func() {
		const batches = 100 // a second
		tick := time.NewTicker(time.Second / batches)
		defer tick.Stop()
		for others := u.cluster.Services - 1; ; {
			select {
			case <-stop:
				sent <- nil
				return
			case <-tick.C:
			}
			for ; count < int(time.Since(begin).Seconds()*float64(rate)); count++ {
				if err := u.api.send("endpointslices", "MODIFIED", u.cluster.rolled(count%others, count/others)); err != nil {
					sent <- err
					return
				}
			}
		}
	}()
	var lags []time.Duration
	for err == nil && time.Since(begin) < length {
		var lag time.Duration
		if lag, err = u.changeEndpoint(len(lags)); lag >= changePatience {
			err = nil
		}
		lags = append(lags, lag)
		select {
		case failed := <-sent:
			return r, failed
		case <-time.After(probePause):
		}
	}
	close(stop)
	if failed := <-sent; err == nil {
		err = failed
	}
	if err != nil {
		return r, err
	}
	took := time.Since(begin)
	after, err := procstat.CPU(pids)
	if err != nil {
		return r, err
	}
	r.Rate, r.Cores = float64(count)/took.Seconds(), (after-before).Seconds()/took.Seconds()
	r.Lag, err = series(len(lags), func(i int) (time.Duration, error) { return lags[i], nil })
	return r, err
}

// probePause is between two measured changes of a rollout.
const probePause = 100 * time.Millisecond

// kernelServes is in what the product says once kernel flows serve, too.
var kernelServes = regexp.MustCompile(`datapath\W+kernel`)

// awaitKernel waits until the product says that the kernel forwards. Its metrics say so, too, but
// those of 30,000 Services take more CPU and memory than what is measured.
func (u *run) awaitKernel() error {
	for deadline := time.Now().Add(startPatience); !kernelServes.MatchString(u.proxy.Log()); time.Sleep(time.Millisecond) {
		select {
		case <-u.proxy.Done():
			return fmt.Errorf("it ended: %s", u.proxy.Log())
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the kernel does not forward after %v; its last words: %s", startPatience, u.proxy.Log())
		}
	}
	return nil
}

const metricsAddress = "127.0.0.1:10249"
