package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/live/filter"
)

// asker is what subcommands share that ask a running proxy.
type asker struct {
	socket string
}

// filterHelp explains filters in the help of subcommands.
const filterHelp = `A FILTER is a list of terms, all of which must hold: FIELD=VALUE, FIELD!=VALUE, or
for numbers also <, <=, >, >= and ranges (2..5). Several values are separated by
commas. A word alone is searched for in names and addresses. Quote < and > for
the shell. docs/admin-api.md lists the fields; the shell completes them.`

func (a *asker) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.socket, "admin-socket", "", "socket of the proxy: a path, @ and an abstract name, or auto: that of the proxy that runs here (default: auto)")
}

// find returns the proxy to ask, and a context that ends with Ctrl-C.
func (a *asker) find(cmd *cobra.Command) (context.Context, *client.Client, error) {
	ctx, _ := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM) // for as long as the process lasts
	c, err := client.Find(ctx, a.socket)
	return ctx, c, err
}

// findFor is find for a command whose arguments are a filter, of which it returns the
// text.
func (a *asker) findFor(cmd *cobra.Command, args []string) (ctx context.Context, c *client.Client, text string, err error) {
	if text, err = parseFilter(args); err == nil {
		ctx, c, err = a.find(cmd)
	}
	return ctx, c, text, err
}

// parseFilter returns the text of a filter that was given as arguments. The error
// shows the place that is wrong.
func parseFilter(args []string) (string, error) {
	text := filter.Join(args)
	_, err := filter.Parse(text)
	return text, pointed(err)
}

// pointed shows the place that is wrong, if the error is a filter's.
func pointed(err error) error {
	var place *filter.Error
	if errors.As(err, &place) {
		return errors.New("the filter is wrong:\n" + place.Pointer())
	}
	return err
}

// completionTime bounds how long the shell waits for suggestions.
const completionTime = 2 * time.Second

// completeFilter suggests how the last word of a filter goes on. Names come from the
// proxy, if one runs.
func (a *asker) completeFilter(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	var found api.Completions
	c, err := client.Find(ctx, a.socket)
	if err == nil {
		err = c.Get(ctx, api.PathComplete, url.Values{"filter": {word}, "at": {strconv.Itoa(len(word))}}, &found)
	}
	if err != nil {
		found = filter.Complete(word, len(word), nil)
	}
	return suggestions(word[:found.Start], found.Suggestions), cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
}

func suggestions(before string, all []api.Suggestion) []string {
	var out []string
	for _, s := range all {
		text := before + s.Text
		if s.About != "" {
			text += "\t" + s.About
		}
		out = append(out, text)
	}
	return out
}

// complete suggests the value of a flag, or a command's only argument: what fields may
// have in filters.
func (a *asker) complete(fields ...string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) (out []string, _ cobra.ShellCompDirective) {
		const none = cobra.ShellCompDirectiveNoFileComp
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
		defer cancel()
		c, err := client.Find(ctx, a.socket)
		if err != nil || len(args) > 0 {
			return nil, none
		}
		for _, field := range fields {
			var found api.Completions
			if err := c.Get(ctx, api.PathComplete, url.Values{"filter": {field + "=" + word}}, &found); err == nil {
				out = append(out, suggestions("", found.Suggestions)...)
			}
		}
		return out, none
	}
}

// completeFlag has the shell complete the value of a flag.
func completeFlag(cmd *cobra.Command, flag string, complete cobra.CompletionFunc) {
	// It fails for a flag that does not exist, which a test would notice.
	_ = cmd.RegisterFlagCompletionFunc(flag, complete)
}

// completeValues has the shell complete the values of a flag.
func completeValues(cmd *cobra.Command, flag string, values []string) {
	completeFlag(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// writeLines writes objects of the API as lines of JSON.
func writeLines[T any](out io.Writer, all []T) error {
	for i := range all {
		line, err := json.Marshal(&all[i])
		if err != nil {
			return err
		}
		if _, err := out.Write(append(printable.JSON(line), '\n')); err != nil {
			return unlessGone(err)
		}
	}
	return nil
}

// errEnough ends a stream.
var errEnough = errors.New("enough")

// follow calls visit with the lines of an answer that does not end, decoded, until visit
// returns errEnough or ctx ends.
func follow[T any](ctx context.Context, c *client.Client, path string, query url.Values, visit func(line []byte, decoded *T) error) error {
	err := c.Stream(ctx, path, query, func(line []byte) error {
		decoded := new(T)
		if err := decode(line, decoded); err != nil {
			return err
		}
		return visit(line, decoded)
	})
	switch {
	case errors.Is(err, errEnough):
		return nil
	case err == nil && ctx.Err() == nil:
		return client.ErrEnded
	}
	return err
}

// decode reads a line of an answer.
func decode(line []byte, to any) error {
	if json.Unmarshal(line, to) != nil {
		return errors.New("the proxy's answer is not understood: is it of another version?")
	}
	return nil
}

// unlessGone makes nothing of an error that says that the reader of the output has gone,
// as head does.
func unlessGone(err error) error {
	if errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return pointed(err)
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// confirm asks a question on the terminal. The end of ctx, as by Ctrl-C, means no.
func confirm(ctx context.Context, cmd *cobra.Command, question string) (bool, error) {
	if !isTerminal(os.Stdin) {
		return false, errors.New("standard input is no terminal: give --yes")
	}
	cmd.PrintErr(question + " [y/N] ")
	yes := agrees(ctx, os.Stdin)
	if ctx.Err() != nil {
		cmd.PrintErrln()
	}
	return yes, nil
}

// agrees reports whether a line says yes.
func agrees(ctx context.Context, in io.Reader) bool {
	line := make(chan string, 1)
	go func() { // it waits until the process ends, if nothing is typed
		buf := make([]byte, 64)
		n, _ := in.Read(buf) // without an answer it is no
		line <- strings.ToLower(strings.TrimSpace(string(buf[:n])))
	}()
	select {
	case answer := <-line:
		return answer == "y" || answer == "yes"
	case <-ctx.Done():
		return false
	}
}
