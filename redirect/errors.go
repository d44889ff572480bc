package redirect

import "fmt"

// Feature is a part of the kernel, or a right of the process, that a mode needs. Each
// mode names its own.
type Feature string

// FeatureNetAdmin is what every mode needs.
const FeatureNetAdmin Feature = "CAP_NET_ADMIN"

// RemedyNetAdmin says how to get FeatureNetAdmin.
const RemedyNetAdmin = "run as root, or grant CAP_NET_ADMIN in the user namespace that owns the network namespace"

// MissingError says what the kernel or the process lacks for a mode, and what can be
// done about it.
type MissingError struct {
	Mode    string // what lacks it: "steering by nftables"
	Feature Feature
	Remedy  string // what to do
	Err     error  // what the kernel answered
}

// Error names the feature and the remedy.
func (e *MissingError) Error() string {
	return fmt.Sprintf("%s: %s is missing (%v): %s", e.Mode, e.Feature, e.Err, e.Remedy)
}

// Unwrap returns the kernel's answer.
func (e *MissingError) Unwrap() error { return e.Err }

// ClashError says that another program has what only one can have.
type ClashError struct {
	What   string // what is there
	Remedy string // what to do; may be empty
}

// Error names what is there, and what to do.
func (e *ClashError) Error() string {
	text := e.What + " is there and not ours"
	if e.Remedy != "" {
		text += ": " + e.Remedy
	}
	return text
}
