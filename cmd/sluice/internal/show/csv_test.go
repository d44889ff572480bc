package show

import (
	"bytes"
	"encoding/csv"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// A row has each field under its name, and what is not known is empty.
func TestCSV(t *testing.T) {
	first := int64(7)
	var out bytes.Buffer
	c := NewCSV(&out)
	err := c.Row(&api.Connection{
		Time: time.Date(2026, 6, 1, 12, 0, 0, 250123000, time.UTC), ID: 3, Client: "10.0.0.1:5", Service: `a/"b",c`, Attempts: 3, FirstByteUS: &first,
		Failed: []api.Attempt{{Endpoint: "10.1.0.4:80", Pod: "shop/web-1", Error: "refused", US: 9}, {Error: "no_resources"}}, End: "client_fin",
	})
	must.OK(t, err)
	must.OK(t, c.Flush())
	rows, err := csv.NewReader(&out).ReadAll()
	if err != nil || len(rows) != 2 {
		t.Fatalf("%v, %q", err, rows)
	}
	got := make(map[string]string)
	for i, name := range rows[0] {
		got[name] = rows[1][i]
	}
	for name, want := range map[string]string{
		"time": "2026-06-01T12:00:00.250123Z", "id": "3", "client": "10.0.0.1:5", "service": `a/"b",c`, "attempts": "3", "first_byte_us": "7", "connect_us": "",
		"failed_attempts": "10.1.0.4:80 shop/web-1 refused 9; no_resources 0", "messages_from_client": "", "bytes_from_client": "0", "end": "client_fin",
	} {
		if text, ok := got[name]; text != want || !ok {
			t.Errorf("%s: %q, want %q", name, text, want)
		}
	}
	if _, ok := got["lost"]; ok {
		t.Error("a field that is of no connection is a column")
	}
}

// The page saves the same columns, but for the node of the proxy: it asks one alone.
func TestPageHasColumns(t *testing.T) {
	text := must.Read(t, "../../../../web/assets/js/export.js")
	list := regexp.MustCompile(`(?s)columns = \[(.*?)\]`).FindSubmatch(text)
	var names []string
	for _, m := range regexp.MustCompile(`"(\w+)"`).FindAllSubmatch(list[1], -1) {
		names = append(names, string(m[1]))
	}
	check.EqualSlicesf(t, names, slices.DeleteFunc(slices.Clone(csvNames), func(n string) bool { return n == "proxy_node" }), "the page has")
}
