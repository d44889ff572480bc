package manifests

import (
	"maps"
	"time"
)

// maxErrors bounds Stats.Errors.
const maxErrors = 5

// Stats describes a Watcher at one moment.
type Stats struct {
	// Files is the number of files with a manifest's name.
	Files int `metric:"sluice_manifest_files" help:"Files with a manifest's name in the directory."`
	// FilesInError is how many of them are unreadable or invalid; their last good
	// content, if any, is in force.
	FilesInError int `metric:"sluice_manifest_files_in_error" help:"Files among them that could not be read or are invalid."`
	// Errors has the first error of each of them, of at most maxErrors, with the file's
	// name.
	Errors []string
	// Objects counts the objects in force by kind, as the manifests have
	// them: "Service", "EndpointSlice", "Endpoints", "Node", "ServiceCIDR".
	Objects map[string]int
	// PassedOver counts the objects of other kinds by kind.
	PassedOver map[string]int `metric:"sluice_manifest_objects_passed_over" help:"Objects of kinds that are ignored."`
	// LastChange is when the last change was passed on; zero before the first.
	LastChange time.Time
	// Polling is set while the directory is read every 50 ms because the system
	// does not report changes.
	Polling bool `metric:"sluice_manifest_polling" help:"1 while the directory is read every 50 ms, as the system does not report changes."`
}

// Stats returns the numbers as of the last look at the directory. The maps are
// the caller's. Safe for concurrent use.
func (w *Watcher) Stats() Stats {
	s := *w.stats.Load()
	s.Objects = maps.Clone(s.Objects)
	s.PassedOver = maps.Clone(s.PassedOver)
	return s
}
