package show

import (
	"encoding/csv"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
)

// CSV writes connections as comma-separated values (RFC 4180) under the names of the JSON
// fields. Failed attempts are in one cell, separated by semicolons.
type CSV struct{ out *csv.Writer }

// NewCSV returns a CSV, with the header written.
func NewCSV(out io.Writer) *CSV {
	c := &CSV{csv.NewWriter(out)}
	_ = c.out.Write(csvNames) // it is told of by Flush
	return c
}

// csvFields are the fields of api.Connection that are columns, and csvNames their names.
var csvFields, csvNames = columns()

func columns() (fields []int, names []string) {
	t := reflect.TypeFor[api.Connection]()
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		switch name {
		case "event", "lost", "past", "verdict": // of lines that are no connections, and of one alone
			continue
		}
		fields, names = append(fields, i), append(names, name)
	}
	return fields, names
}

// Row writes a connection.
func (c *CSV) Row(o *api.Connection) error {
	row := make([]string, len(csvFields))
	v := reflect.ValueOf(o).Elem()
	for i, field := range csvFields {
		row[i] = cell(v.Field(field))
	}
	return c.out.Write(row)
}

// cell returns the text of a field; none if it is not known.
func cell(v reflect.Value) string {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return ""
		}
		v = v.Elem()
	}
	switch v := v.Interface().(type) {
	case time.Time:
		return v.Format(time.RFC3339Nano)
	case []api.Attempt:
		var list []string
		for _, a := range v {
			list = append(list, strings.Join(strings.Fields(fmt.Sprint(a.Endpoint, " ", a.Pod, " ", a.Error, " ", a.US)), " "))
		}
		return strings.Join(list, "; ")
	default:
		return fmt.Sprint(v)
	}
}

// Flush writes what waits.
func (c *CSV) Flush() error {
	c.out.Flush()
	return c.out.Error()
}
