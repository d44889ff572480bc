package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// version is set by the linker.
var version = "dev"

func newVersionCommand() *cobra.Command {
	output := newChoice("text", "json")
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output.value == "text" {
				return writeVersion(cmd.OutOrStdout())
			}
			e := json.NewEncoder(cmd.OutOrStdout())
			e.SetIndent("", "  ")
			return e.Encode(struct {
				Version   string `json:"version"`
				GoVersion string `json:"goVersion"`
				Platform  string `json:"platform"`
			}{version, runtime.Version(), platform})
		},
	}
	output.register(cmd, "output", "o", "form of the output")
	return cmd
}

const platform = runtime.GOOS + "/" + runtime.GOARCH

func writeVersion(w io.Writer) error {
	_, err := fmt.Fprintf(w, "sluice %s (%s, %s)\n", version, runtime.Version(), platform)
	return err
}

// versionFlag is --version, also --version=raw as kube-proxy has it.
// --version=v1.2.3 sets what kube-proxy reports, and has no effect.
type versionFlag struct{ given bool }

func (v *versionFlag) register(f *pflag.FlagSet) {
	f.VarPF(v, "version", "", "print the version, and exit").NoOptDefVal = "true"
}

func (v *versionFlag) Type() string   { return "bool" }
func (v *versionFlag) String() string { return strconv.FormatBool(v.given) }

func (v *versionFlag) Set(s string) (err error) {
	switch {
	case s == "raw":
		v.given = true
	case !strings.HasPrefix(s, "v"):
		v.given, err = strconv.ParseBool(s)
	}
	return err
}
