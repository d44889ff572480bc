package main

import "github.com/spf13/pflag"

// runWebOptions are the flags of the page of sluice run.
type runWebOptions struct {
	address string
	hosts   []string
}

func (o *runWebOptions) register(f *pflag.FlagSet) {
	f.StringVar(&o.address, "web-bind-address", "", "address and port of the page that shows what happens now, read-only and without login; a port alone is one of loopback (default: none)")
	f.StringSliceVar(&o.hosts, "web-allowed-hosts", nil, "names by which browsers may ask for the page, beside localhost and the address itself")
}

// validate completes the address.
func (o *runWebOptions) validate() (err error) {
	if o.address != "" {
		o.address, err = pageAddress("web-bind-address", o.address)
	}
	return err
}
