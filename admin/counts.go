package admin

import (
	"reflect"
	"sync/atomic"
)

// MetricsOf returns the metrics of what a package counts: one for each field of its Stats
// that has the tags metric, a name, and help:
//
//	Strays uint64 `metric:"sluice_connections_unserved_total" help:"Accepted connections to …"`
//
// A field is an integer, a bool (1 or 0), a map of ints (their sum), an atomic number, or
// a struct of such fields. stats is called at each scrape, from any goroutine; it may
// return a pointer.
func MetricsOf[T any](stats func() T) []Metric {
	t := reflect.TypeFor[T]()
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return metricsOf(t, nil, func() reflect.Value { return reflect.Indirect(reflect.ValueOf(stats())) })
}

// metricsOf returns those of the struct t, which is at a path of fields in what stats
// returns.
func metricsOf(t reflect.Type, path []int, stats func() reflect.Value) (list []Metric) {
	for i := range t.NumField() {
		f := t.Field(i)
		at := append(path[:len(path):len(path)], i)
		if name, is := f.Tag.Lookup("metric"); is {
			list = append(list, NewMetric(name, f.Tag.Get("help"), func() float64 { return number(stats().FieldByIndex(at)) }))
		} else if f.Type.Kind() == reflect.Struct {
			list = append(list, metricsOf(f.Type, at, stats)...)
		}
	}
	return list
}

// number returns the value of a field; 0 for a type that is no number, which the test of
// all metrics finds.
func number(v reflect.Value) float64 {
	if v.CanAddr() {
		switch n := v.Addr().Interface().(type) {
		case *atomic.Int64:
			return float64(n.Load())
		case *atomic.Uint64:
			return float64(n.Load())
		}
	}
	switch {
	case v.CanInt():
		return float64(v.Int())
	case v.CanUint():
		return float64(v.Uint())
	case v.Kind() == reflect.Bool && v.Bool():
		return 1
	}
	if counts, is := v.Interface().(map[string]int); is {
		sum := 0
		for _, n := range counts {
			sum += n
		}
		return float64(sum)
	}
	return 0
}
