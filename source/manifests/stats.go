package manifests

import (
	"maps"
	"time"
)

// Stats is what a Watcher has to say about its work, at one moment.
type Stats struct {
	// Files is the number of files with a manifest's name.
	Files int
	// FilesInError is how many of them could not be read or do not hold what
	// they should; their last good content, if any, is in force.
	FilesInError int
	// Objects counts the objects in force by kind, as the manifests have
	// them: "Service", "EndpointSlice", "Endpoints", "Node", "ServiceCIDR".
	Objects map[string]int
	// PassedOver counts the objects of other kinds by kind.
	PassedOver map[string]int
	// LastChange is when the last change was given on; zero before the first.
	LastChange time.Time
	// Polling is set while the directory is looked at every so often because
	// the system does not tell about changes.
	Polling bool
}

// Stats gives the numbers as of the last look at the directory. The maps are
// the caller's. Safe for concurrent use.
func (w *Watcher) Stats() Stats {
	s := *w.stats.Load()
	s.Objects = maps.Clone(s.Objects)
	s.PassedOver = maps.Clone(s.PassedOver)
	return s
}
