// Command mutate shows that the tests can fail. It puts mistakes into the product,
// one at a time, and wants a certain test to notice each:
//
//	go run ./test/mutate            # all; make mutate
//	go run ./test/mutate -list
//	go run ./test/mutate -run 'half-close|affinity'
//
// The tree is not touched: each mutated file is in a temporary directory, and the
// go command takes it in place of the product's (-overlay). End-to-end tests run the
// mutated product. Before that the test has to pass without the mutation. A mutation
// counts as caught if an assertion of the test fails; one that does not compile, panics
// or hangs does not count. list.go joins the lists of mutations.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	run := flag.String("run", "", "apply only the mutations whose names match this regular expression")
	parallel := flag.Int("parallel", min(max(runtime.NumCPU(), 2), 4), "how many mutations to apply at a time; tests that compare times run alone")
	list := flag.Bool("list", false, "print the mutations and apply none")
	flag.Parse()
	selected, err := choose(*run)
	if err == nil && *list {
		for _, m := range selected {
			fmt.Printf("%-26s %s\n%26s %s, %s\n", m.name, m.what, "", m.pkg, m.test)
		}
		return
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = play(ctx, selected, max(*parallel, 1))
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

// choose gives the mutations whose names match.
func choose(expression string) ([]*mutation, error) {
	re, err := regexp.Compile(expression)
	if err != nil {
		return nil, err
	}
	var selected []*mutation
	for i := range mutations {
		if re.MatchString(mutations[i].name) {
			selected = append(selected, &mutations[i])
		}
	}
	if len(selected) == 0 {
		return nil, fmt.Errorf("no mutation's name matches %q", expression)
	}
	return selected, nil
}

// play applies the mutations. The error says how many were not caught.
func play(ctx context.Context, selected []*mutation, parallel int) error {
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "sluice-mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	start := time.Now()
	r := &runner{root: root, dir: dir}
	var beside, alone []*mutation
	for _, m := range selected {
		if m.judgesTime() {
			alone = append(alone, m)
		} else {
			beside = append(beside, m)
		}
	}
	missed := r.applyAll(ctx, beside, parallel) + r.applyAll(ctx, alone, 1)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	fmt.Printf("%d of %d mutations were caught in %v\n", len(selected)-missed, len(selected), time.Since(start).Round(time.Second))
	if missed > 0 {
		return fmt.Errorf("%d mutations were not caught: their tests cannot fail, or the list is out of date", missed)
	}
	return nil
}

// applyAll applies mutations, some in parallel, and prints the result of each. It returns the number
// of missed ones.
func (r *runner) applyAll(ctx context.Context, list []*mutation, parallel int) int {
	next := make(chan *mutation)
	var missed atomic.Int64
	var workers sync.WaitGroup
	for range parallel {
		workers.Go(func() {
			for m := range next {
				began := time.Now()
				v, err := r.apply(ctx, m)
				if ctx.Err() != nil {
					continue
				}
				took := time.Since(began).Round(time.Second)
				if err != nil {
					missed.Add(1)
					fmt.Printf("%-26s MISSED by %s (%v): %v\n", m.name, m.testName(), took, err)
					continue
				}
				fmt.Printf("%-26s caught by %s (%v): %s\n", m.name, m.testName(), took, v.line)
			}
		})
	}
	for _, m := range list {
		next <- m
	}
	close(next)
	workers.Wait()
	return int(missed.Load())
}

// apply applies one mutation. The error says why it counts as missed.
func (r *runner) apply(ctx context.Context, m *mutation) (verdict, error) {
	dir, err := os.MkdirTemp(r.dir, m.name+"-")
	if err != nil {
		return verdict{}, err
	}
	defer os.RemoveAll(dir)
	overlay, err := r.overlay(ctx, m, dir)
	if err != nil {
		return verdict{}, err
	}
	program, err := r.build(ctx, m, overlay, dir)
	if err != nil {
		return verdict{}, err
	}
	if v := r.control(ctx, m); v.outcome != passed {
		return v, fmt.Errorf("the test fails without the mutation: %s", v.line)
	}
	v := r.test(ctx, m, overlay, program)
	switch v.outcome {
	case passed:
		return v, errors.New("the test passes")
	case broken:
		return v, errors.New(v.line)
	}
	return v, nil
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(string(bytes.TrimSpace(out))), nil
}
