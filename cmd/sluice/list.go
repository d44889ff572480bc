package main

import (
	"io"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/live/api"
)

// lister is what the subcommands share that list a page of the admin API.
type lister struct {
	asker
	output choice
	limit  int
}

// register adds the flags.
func (o *lister) register(cmd *cobra.Command, limit int) {
	o.asker.register(cmd)
	o.output = newChoice("text", "json")
	o.output.register(cmd, "output", "o", "form of the output; json is one object on each line")
	cmd.Flags().IntVar(&o.limit, "limit", limit, "show at most so many")
}

// list asks a path of the admin API and writes the rows of the answer, at most as many as
// the user wants; the query may have another limit for what is asked for. rows returns
// them, and how many there are in all; none is said where there are none.
func list[Answer, Row any](o *lister, cmd *cobra.Command, path string, query url.Values, rows func(*Answer) ([]Row, int), table func(io.Writer, []Row) error, none string) error {
	if err := between("limit", o.limit, 1, api.MaxRows); err != nil {
		return err
	}
	ctx, c, err := o.find(cmd)
	if err != nil {
		return err
	}
	if !query.Has("limit") {
		query.Set("limit", strconv.Itoa(o.limit))
	}
	answer := new(Answer)
	if err := c.Get(ctx, path, query, answer); err != nil {
		return err
	}
	found, matched := rows(answer)
	found = found[:min(len(found), o.limit)]
	if err := writeRows(cmd, o.output.value, found, none, table); err != nil {
		return err
	}
	more(cmd, matched-len(found))
	return nil
}

// writeRows writes rows as JSON, or as a table; none is said where there are none.
func writeRows[Row any](cmd *cobra.Command, form string, rows []Row, none string, table func(io.Writer, []Row) error) error {
	switch {
	case form == "json":
		return writeLines(cmd.OutOrStdout(), rows)
	case len(rows) == 0:
		cmd.PrintErrln(none)
		return nil
	}
	return table(cmd.OutOrStdout(), rows)
}

// more says that rows were left out.
func more(cmd *cobra.Command, rows int) {
	if rows > 0 {
		cmd.PrintErrf("and %d more: see --limit\n", rows)
	}
}
