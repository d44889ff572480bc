package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/filter"
)

// recordOptions are the flags that say which records the access log has.
type recordOptions struct {
	filter   recordFilter
	samples  samples
	opens    bool
	refusals bool
	interval time.Duration
	tcp      bool
}

func (o *recordOptions) register(f *pflag.FlagSet) {
	f.Var(&o.filter, "access-log-filter", "write only records that match, such as 'end!=client_fin service=shop/*'")
	f.Var(&o.samples, "access-log-sample", "of the records that match, write only those of one connection in N: '1/100 end=client_fin'; may be given several times, and the first that matches counts")
	f.BoolVar(&o.opens, "access-log-opens", false, "also write a record when a connection has reached its endpoint")
	f.BoolVar(&o.refusals, "access-log-refusals", false, "also write records of packets that were refused or dropped")
	f.DurationVar(&o.interval, "access-log-interval", 0, "also write a record of each open connection at this interval; 0 means none")
	f.BoolVar(&o.tcp, "record-tcp", false, "add to all records of TCP connections what TCP says of both sides: round trips, segments sent again, and others")
}

// shortestRecordInterval is the least --access-log-interval.
const shortestRecordInterval = time.Second

func (o *recordOptions) validate() error {
	if o.interval != 0 && o.interval < shortestRecordInterval {
		return fmt.Errorf("--access-log-interval: %s is shorter than %s; 0 switches it off", o.interval, shortestRecordInterval)
	}
	needs := o.filter.NeedsTransport()
	for i := range o.samples {
		needs = needs || o.samples[i].filter.NeedsTransport()
	}
	if needs && !o.tcp {
		return errors.New("--access-log-filter, --access-log-sample: what TCP says of a connection, such as rtt, is in no record without --record-tcp")
	}
	return nil
}

// keep returns what selects records; nil if all are written.
func (o *recordOptions) keep() func(*conntrack.Record) bool {
	if o.filter.IsEmpty() && len(o.samples) == 0 {
		return nil
	}
	return func(r *conntrack.Record) bool {
		if !o.filter.Match(r) {
			return false
		}
		for i := range o.samples {
			if s := &o.samples[i]; s.filter.Match(r) {
				return r.Sampled(s.each)
			}
		}
		return true
	}
}

// recordFilter is a flag that takes a filter.
type recordFilter struct{ filter.Filter }

func (f *recordFilter) Type() string { return "FILTER" }

func (f *recordFilter) Set(s string) error {
	parsed, err := parseRecordFilter(s)
	if err != nil {
		return err
	}
	f.Filter = *parsed
	return nil
}

// parseRecordFilter parses a filter of the access log.
func parseRecordFilter(text string) (*filter.Filter, error) {
	f, err := filter.Parse(text)
	if err != nil {
		return nil, errors.New("\n" + pointed(err).Error())
	}
	if f.NamesClients() {
		return nil, errors.New("client_pod: the access log does not know the pods of clients")
	}
	return f, nil
}

// sample says that one connection in each of those that match is written.
type sample struct {
	each   uint64
	filter *filter.Filter
}

// samples is a flag that may be given several times.
type samples []sample

func (s *samples) Type() string { return "1/N [FILTER]" }

func (s *samples) String() string { return strings.Join(s.GetSlice(), "; ") }

// GetSlice returns each value as Set takes it.
func (s *samples) GetSlice() (list []string) {
	for i := range *s {
		list = append(list, strings.TrimSpace(fmt.Sprintf("1/%d %s", (*s)[i].each, (*s)[i].filter)))
	}
	return list
}

func (s *samples) Set(text string) error {
	rate, rest, _ := strings.Cut(strings.TrimSpace(text), " ")
	count, ok := strings.CutPrefix(rate, "1/")
	each, err := strconv.ParseUint(count, 10, 32)
	if !ok || err != nil || each == 0 {
		return fmt.Errorf("%q does not begin with 1/N, such as 1/100", text)
	}
	f, err := parseRecordFilter(rest)
	if err != nil {
		return err
	}
	*s = append(*s, sample{each, f})
	return nil
}
