package service

import (
	"encoding/json"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

func TestUIDsDiffer(t *testing.T) {
	const uuid = "0af1bd3e-1f47-4c55-9b6a-0123456789ab"
	seen := make(map[UID]string)
	for _, text := range []string{
		"", "u", "v", uuid, "1" + uuid[1:], uuid[:35] + "c", uuid[:35], uuid + "0",
		"0AF1BD3E-1F47-4C55-9B6A-0123456789AB", "0af1bd3e01f47-4c55-9b6a-0123456789ab", "0af1bd3e-1f47-4c55-9b6a-0123456789ax",
	} {
		u := UIDOf(text)
		if other, is := seen[u]; is {
			t.Errorf("%q and %q are the same", text, other)
		}
		seen[u] = text
		check.Equalf(t, u == UID{}, text == "", "%q: %v", text, u)
	}
	check.Equal(t, UIDOf(uuid).String(), uuid)
}

// A process hands UIDs over as texts: one before it knew UIDs as texts alone.
func TestUIDPassesAsText(t *testing.T) {
	for _, text := range []string{"", "u", "0af1bd3e-1f47-4c55-9b6a-0123456789ab"} {
		var fromOld, fromNew struct{ PodUID UID }
		old, err := json.Marshal(struct{ PodUID string }{text})
		if err == nil {
			err = json.Unmarshal(old, &fromOld)
		}
		if err != nil || fromOld.PodUID != UIDOf(text) {
			t.Errorf("%s: %v, %v", old, fromOld.PodUID, err)
		}
		now, err := json.Marshal(fromOld)
		if err == nil {
			err = json.Unmarshal(now, &fromNew)
		}
		if err != nil || fromNew != fromOld || text != "u" && string(now) != string(old) {
			t.Errorf("%s, then %s: %v, %v", old, now, fromNew, err)
		}
	}
}

func FuzzUIDOf(f *testing.F) {
	f.Add("u")
	f.Add("0af1bd3e-1f47-4c55-9b6a-0123456789ab")
	f.Fuzz(func(t *testing.T, text string) {
		u := UIDOf(text)
		check.Equalf(t, UIDOf(u.String()), u, "%q: %v, then", text, u)
	})
}
