package bpf

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/bpfobject"
)

func TestObjectsAreWhatTheSourcesGive(t *testing.T) { bpfobject.Check(t) }
