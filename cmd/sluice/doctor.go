package main

import (
	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/doctor"
)

func newDoctorCommand() *cobra.Command {
	o := newSteeringOptions()
	output := newChoice("text", "json")
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Report what Sluice can use on this machine, and what prevents the rest",
		Long: `Doctor tries every steering mode in a temporary network namespace. It also checks
capabilities, limits, sysctls, leftovers of kube-proxy, and whether a proxy is
running. It changes nothing. How each row was found out is in -o json.

The exit status is 1 if no steering mode works.`,
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
	output.register(cmd, "output", "o", "form of the report")
	o.registerNames(cmd.Flags())
	return cmd
}
