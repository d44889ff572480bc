package main

import (
	"time"
	"github.com/sluice-proxy/sluice/test/bench/load"
)

type patternOrder struct{ Specs []load.PatternSpec }
type patternResult struct{}

func runPatterns(patternOrder) (patternResult, error) { return patternResult{}, nil }
func (b *bench) soak(uint64) error { return nil }
func (b *bench) slowReader(time.Duration) error { return nil }
func (b *bench) openMany(int) error { return nil }
