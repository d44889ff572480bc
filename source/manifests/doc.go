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
// Services without a cluster IP get one of Options.Allocate, and their annotation
// sluice.dev/endpoints becomes EndpointSlices. Endpoints become EndpointSlices unless the manifests hold a slice for the
// same service. Of two objects with one name the one counts that came first, and at
// the start the first in the order of paths.
//
// # Errors
//
// Files are validated as the API server would, each as a whole. An error is logged
// with file, line and object, once for each content; the file's last good content
// stays in force, and so do all other files. The same holds for files that become
// unreadable and a directory that disappears. Deleting a file deletes its objects;
// emptying it does so after two seconds, because programs empty files before they
// write them.
//
// An unknown field is a warning, not an error: it may be a typing error, or come from
// a newer cluster.
//
// # Goroutines
//
// Run's goroutine owns everything but Stats and Where, and is the one that calls apply.
// Files that changed are read by as many goroutines as there are processors,
// which end before apply is called.
package manifests
