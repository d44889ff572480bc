// Package manifests reads Services, EndpointSlices, Endpoints, Nodes and
// ServiceCIDRs from a directory of Kubernetes manifests and watches it.
//
//	w := manifests.New("/etc/sluice/manifests", manifests.Options{Logger: log})
//	err := w.Run(ctx, func(c service.Change) { snapshot = store.Apply(c) })
//
// # Input
//
// Each *.yaml, *.yml and *.json file below the directory is read, through
// symlinks too; names that begin with a dot are left out. A file may hold
// several documents, Lists, and what "kubectl get -o yaml" prints. Objects get
// the API server's defaults: no status, no uid, no protocol are needed. Other
// kinds are counted and passed over.
//
// Endpoints become EndpointSlices unless the manifests hold a slice for the
// same service. Of two objects with one name the first in the order of paths
// counts.
//
// # Errors
//
// Files are judged as the API server would, and as wholes. A file with an error
// is logged with file, line and object, once for each content; what it held
// when it was last in order stays in force, and all other files go on. That
// includes files that can no longer be read and a directory that disappears. A
// file that is deleted takes its objects away; one that is emptied does so
// after two seconds, because programs empty files before they write them.
//
// A field that the API does not know is a warning, not an error: it may be a
// slip of the pen, or come from a newer cluster.
//
// # Goroutines
//
// Run's goroutine owns everything but Stats, and is the one that calls apply.
// Files that changed are read by as many goroutines as there are processors,
// which end before apply is called.
package manifests
