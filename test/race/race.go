// Package race tells tests whether they run with the race detector.
package race

// Fewer gives how many of n rounds a test plays whose code runs on one
// goroutine: with the detector, which has nothing to find there and takes up to
// ten times as long, a twentieth of them. `make test` runs such tests without it too.
func Fewer(n int) int {
	if Enabled {
		return max(n/20, 1)
	}
	return n
}
