// Command sluice is a service proxy for Kubernetes that needs no NAT.
package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/internal/printable"
)

func main() {
	root, args := commandFor(os.Args)
	root.SetArgs(args)
	if err := root.Execute(); err != nil {
		var code exitCode
		if errors.As(err, &code) {
			os.Exit(int(code))
		}
		if !errors.Is(err, errReported) {
			within(logPatience, func() { fmt.Fprintln(os.Stderr, "sluice: "+printable.Lines(strings.Join(errorLines(err), "\n  "))) })
		}
		os.Exit(1)
	}
}

func newRootCommand() *cobra.Command {
	var version versionFlag
	root := &cobra.Command{
		Use:   "sluice",
		Short: "A service proxy for Kubernetes that needs no NAT",
		Long: `Sluice accepts the connections that clients make to Kubernetes Services, picks
an endpoint, tries another one if that fails, splices bulk without copying it,
and writes one record of each connection.

To see it work, on any Linux machine and without a cluster:  sluice demo`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArguments,
		// Without it a command that does not exist would be no error.
		RunE: func(cmd *cobra.Command, _ []string) error {
			if version.given {
				return writeVersion(cmd.OutOrStdout())
			}
			return cmd.Help()
		},
	}
	version.register(root.Flags())
	root.SetFlagErrorFunc(explainFlagError)
	root.SuggestionsMinimumDistance = 2
	root.AddCommand(
		newRunCommand(), newDemoCommand(), newDevCommand(), newCheckCommand(), newHostsCommand(), newEnvCommand(), newConnsCommand(), newTapCommand(), newLogCommand(), newTopCommand(),
		newPcapCommand(), newCloseCommand(), newDrainCommand(), newStatusCommand(), newStartedCommand(), newWebCommand(), newFailuresCommand(), newSlowCommand(), newStoryCommand(),
		newServicesCommand(), newEndpointsCommand(),
		newDestinationsCommand(), newExplainCommand(), newDoctorCommand(), newCleanupCommand(), newVersionCommand(), newClusterCommand(), newDialStdioCommand(),
	)
	completeChoices(root)
	return root
}
