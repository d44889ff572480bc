package main

import (
	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/doctor"
)

func newDoctorCommand() *cobra.Command {
	o := newSteeringOptions()
	output := choice{value: "text", allowed: []string{"text", "json"}}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what of this machine Sluice can use, and what is in its way",
		Long: `Doctor tries every way of steering, in a network namespace that it makes for
that, and looks at what else matters: rights, limits, settings of the kernel, what
kube-proxy left behind, and whether a proxy is running. It changes nothing.

The exit status is 1 when no way of steering works.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return err
			}
			report := doctor.Examine(doctor.Host(o.choose(nil)))
			write := report.WriteText
			if output.value == "json" {
				write = report.WriteJSON
			}
			if err := write(cmd.OutOrStdout()); err != nil {
				return err
			}
			if !report.Works() {
				return errReported
			}
			return nil
		},
	}
	cmd.Flags().VarP(&output, "output", "o", "form of the report")
	o.registerNames(cmd.Flags())
	return cmd
}
