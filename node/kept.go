package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// keptState is the kind of a handover.State: bytes of a stream of manifests.Kept.
const keptState = "kept"

const (
	mostKept  = 32 << 20 // bytes of JSON that one process gives the next, in all
	keptPart  = 64 << 10 // of them in a message
	keptNames = 64 << 10 // bytes of names in a request
)

// untilAsked waits until the next process has its configuration. As often as it asks, it gets the
// last good content of manifests that it cannot use.
func (p *Proxy) untilAsked(c *handover.Conn) error {
	for left := mostKept; ; {
		m, err := c.Receive(0)
		switch {
		case err != nil:
			return fmt.Errorf("wait for %s: %w", handover.StepAsk, err)
		case m.Step == handover.StepAsk:
			return nil
		case m.Step != handover.StepKept:
			return fmt.Errorf("%s in place of %s", m.Step, handover.StepAsk)
		}
		if err := p.tellKept(c, m.Wanted, &left); err != nil {
			return err
		}
	}
}

func (p *Proxy) tellKept(c *handover.Conn, wanted *handover.Wanted, left *int) error {
	if p.manifests != nil {
		err := p.manifests.Keep(wanted.Dir, wanted.Files, func(k *manifests.Kept) error {
			data, err := json.Marshal(k)
			if err != nil {
				return err
			}
			if len(data) > *left {
				p.log.Warn().Int("bytes", len(data)).Int("most", mostKept).Msgf("%s: its last good content is too large for the next sluice", k.File)
				return nil
			}
			*left -= len(data)
			for part := range slices.Chunk(data, keptPart) {
				if err := c.Tell(keptState, part); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return c.Send(&handover.Message{Step: handover.StepOver})
}

// askKept asks the running process for the last good content of manifests. It runs before the first
// configuration is known: until then, nobody else uses the connection.
func (p *Proxy) askKept(dir string, names []string) (list []manifests.Kept) {
	conn, stream := p.before.conn, bytes.Buffer{}
	for len(names) > 0 {
		n, size := 0, 0
		for n < len(names) && (n == 0 || size+len(names[n]) < keptNames) {
			size += len(names[n]) + len(`"",`)
			n++
		}
		var states []handover.State
		err := conn.Send(&handover.Message{Step: handover.StepKept, Wanted: &handover.Wanted{Dir: dir, Files: names[:n]}})
		if err == nil {
			states, err = conn.AwaitStates(handover.StepOver, handover.Patience)
		}
		for _, s := range states {
			var part []byte
			if err == nil && s.Kind == keptState {
				err = json.Unmarshal(s.Data, &part)
				stream.Write(part)
			}
		}
		if err != nil {
			_ = conn.Close() // what comes late is no answer to other questions
			p.log.Warn().Err(err).Msg("the running sluice does not say what was in manifests that are in error")
			return nil
		}
		names = names[n:]
	}
	for from := json.NewDecoder(&stream); ; {
		var k manifests.Kept
		err := from.Decode(&k)
		if err != nil && !errors.Is(err, io.EOF) {
			p.log.Warn().Err(err).Msg("cannot read what the running sluice says of manifests that are in error")
		}
		if err != nil {
			return list
		}
		list = append(list, k)
	}
}
