package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// checkOptions are the flags of sluice check.
type checkOptions struct {
	output choice
	failOn choice
	ranges prefixes
}

func newCheckCommand() *cobra.Command {
	o := &checkOptions{output: newChoice("text", "json"), failOn: newChoice(manifests.Warning, manifests.Error)}
	cmd := &cobra.Command{
		Use:   "check [flags] {DIR | FILE...}",
		Short: "Find mistakes in manifests",
		Long: `Check reads manifests as sluice dev and sluice run do, and prints everything that is
wrong with them, with file, line and remedy. An error keeps a file from being used.
A warning is what Kubernetes allows though probably nobody wants it: a selector that
no pod has, a target port that no endpoint has, a Service that nothing serves, a
Deployment that no Service selects, a file that is not read.

Give all files that belong together: names are compared between them. Nothing is
asked but the files.

The exit status is 1 if something is found, with --fail-on=error only for errors.`,
		Example: `  sluice check k8s/
  sluice check -o json web.yaml api.yaml | jq -r '.findings[].text'
  kubectl kustomize overlays/dev > all.yaml && sluice check all.yaml`,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("sluice check: which manifests? for example: sluice check k8s/")
			}
			return o.check(cmd.OutOrStdout(), args)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	o.output.register(cmd, "output", "o", "form of the output")
	o.failOn.register(cmd, "fail-on", "", "the least that makes the exit status 1")
	f.Var(&o.ranges, "allocate-cluster-ips", "ranges of cluster IPs, unless the manifests have ServiceCIDRs (default: "+devRanges+")")
	return cmd
}

func (o *checkOptions) check(out io.Writer, paths []string) error {
	report, err := inspect(paths, o.ranges)
	if err != nil {
		return err
	}
	wrong := 0
	for _, f := range report.Findings {
		if f.Severity == manifests.Error {
			wrong++
		}
	}
	if err := o.write(out, report, wrong); err != nil {
		return unlessGone(err)
	}
	switch {
	case report.Files == 0 && len(report.Findings) == 0:
		return fmt.Errorf("%s: there are no manifests, *.yaml, *.yml or *.json", paths[0])
	case wrong > 0, len(report.Findings) > 0 && o.failOn.value == manifests.Warning:
		return errReported
	}
	return nil
}

// inspect reads manifests as sluice dev does.
func inspect(paths []string, ranges prefixes) (*manifests.Report, error) {
	if len(ranges) == 0 {
		if err := ranges.Set(devRanges); err != nil {
			return nil, err
		}
	}
	run := newRunOptions()
	run.manifests, run.allocate = ".", ranges
	if err := run.validAllocate(); err != nil {
		return nil, err
	}
	config := run.config()
	return manifests.Inspect(paths, config.Manifests(zerolog.Nop()), config.Store)
}

// write writes the report; wrong counts the errors in it.
func (o *checkOptions) write(out io.Writer, report *manifests.Report, wrong int) error {
	if o.output.value == "json" {
		text, err := json.MarshalIndent(struct {
			Files    int                 `json:"files"`
			Services int                 `json:"services"`
			Errors   int                 `json:"errors"`
			Warnings int                 `json:"warnings"`
			Findings []manifests.Finding `json:"findings"`
		}{report.Files, len(report.Services), wrong, len(report.Findings) - wrong, append([]manifests.Finding{}, report.Findings...)}, "", "  ")
		if err == nil {
			_, err = fmt.Fprintln(out, string(printable.JSON(text)))
		}
		return err
	}
	for _, f := range report.Findings {
		if _, err := fmt.Fprintln(out, printable.Text(findingLine(f))); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(out, "files %d, Services %d, errors %d, warnings %d\n", report.Files, len(report.Services), wrong, len(report.Findings)-wrong)
	return err
}

// findingLine returns "web.yaml:12: error: Service shop/web: what is wrong".
func findingLine(f manifests.Finding) string {
	where, text := f.File, f.Text
	if f.Line > 0 {
		where = fmt.Sprintf("%s:%d", where, f.Line)
	}
	if f.Object != "" {
		text = f.Object + ": " + text
	}
	return fmt.Sprintf("%s: %s: %s", where, f.Severity, text)
}
