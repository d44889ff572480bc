package filter

import (
	"strings"
	"testing"
)

func TestComplete(t *testing.T) {
	values := func(field string) []string {
		if field == "service" {
			return []string{"shop/web", "shop/cart", "shop/web", "kube-system/dns"}
		}
		if field == "zone" { // of an endpoint: the API server takes any text
			return []string{"z1", "a b", "z\x1b[2J", "z\u202e", "z\ny", `z"`, "z=1", "z,2", "Zürich"}
		}
		return nil
	}
	for _, tt := range []struct {
		text, want string // | is the cursor
	}{
		{"du|", "0: duration>"},
		{"service=web by|", "12: bytes> bytes_from_client> bytes_from_endpoint>"},
		{"service=sh|", "8: shop/cart shop/web"},
		{"service!=shop/web,|", "18: kube-system/dns shop/cart shop/web"},
		{"service=shop/w| bytes>1", "8: shop/web"},
		{"state=|", "6: connecting ended open"},
		{"end=endpoint_|", "4: endpoint_abort endpoint_comm_lost endpoint_fin endpoint_gone endpoint_reset endpoint_shutdown endpoint_timeout"},
		{"protocol=u|", "9: UDP"},
		{"zone=|", "5: Zürich z1"},
		{"nix=|", "4:"},
		{"bytes>|", "6:"},
	} {
		at := strings.IndexByte(tt.text, '|')
		found := Complete(strings.Replace(tt.text, "|", "", 1), at, values)
		got := itoa(found.Start) + ":"
		for _, s := range found.Suggestions {
			got += " " + s.Text
		}
		if got != tt.want {
			t.Errorf("%s: %s, want %s", tt.text, got, tt.want)
		}
	}
	if all := Complete("", 0, nil).Suggestions; len(all) != len(fields) {
		t.Errorf("%d fields are suggested, want %d", len(all), len(fields))
	}
}

func itoa(n int) string {
	if n >= 10 {
		return itoa(n/10) + itoa(n%10)
	}
	return string(rune('0' + n))
}
