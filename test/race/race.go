// Package race tells tests whether they run with the race detector.
package race

// Fewer returns how many of n rounds a test with a single goroutine plays. With
// the detector, which can find nothing there and makes it up to ten times slower,
// it is a twentieth. `make test` also runs such tests without the detector.
func Fewer(n int) int {
	if Enabled {
		return max(n/20, 1)
	}
	return n
}
