package service

import (
	"encoding/hex"
	"hash/fnv"
	"strings"
)

// UID is the UID of a Kubernetes object: a UUID, whose text takes four times as much memory.
// It holds a hash of any other text. The zero value means none.
type UID [16]byte

// UIDOf returns the UID with that text; "" is none.
func UIDOf(text string) (u UID) {
	if text == "" || u.parse(text) {
		return u
	}
	h := fnv.New128a()
	_, _ = h.Write([]byte(text)) // it never fails
	return UID(h.Sum(nil))
}

// uuidGroups are the lengths of a UUID's groups, in bytes.
var uuidGroups = [...]int{4, 2, 2, 2, 6}

// parse reads a UUID in the form that String writes, or returns false.
func (u *UID) parse(text string) bool {
	if len(text) != 36 || strings.ToLower(text) != text {
		return false
	}
	var read UID
	at := 0
	for _, n := range uuidGroups {
		if at > 0 {
			if text[0] != '-' {
				return false
			}
			text = text[1:]
		}
		if _, err := hex.Decode(read[at:at+n], []byte(text[:2*n])); err != nil {
			return false
		}
		at, text = at+n, text[2*n:]
	}
	*u = read
	return true
}

// String returns a text of which UIDOf makes the same UID: a UUID, or "" for none.
func (u UID) String() string {
	if u == (UID{}) {
		return ""
	}
	var b []byte
	at := 0
	for _, n := range uuidGroups {
		if at > 0 {
			b = append(b, '-')
		}
		b = hex.AppendEncode(b, u[at:at+n])
		at += n
	}
	return string(b)
}

// MarshalText returns String.
func (u UID) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText reads any text as UIDOf does.
func (u *UID) UnmarshalText(text []byte) error {
	*u = UIDOf(string(text))
	return nil
}
