package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// holder is a child process that keeps connections open.
type holder struct {
	process  *world.Process
	in       io.WriteCloser
	commands *json.Encoder
	replies  *json.Decoder
}

func (s *stage) hold() (*holder, error) {
	command := s.b.self(holdRole, nil, s.relay.Targets[0].String())
	process, in, out, err := s.world.Client.Talk(command)
	if err != nil {
		return nil, err
	}
	return &holder{process, in, json.NewEncoder(in), json.NewDecoder(out)}, nil
}

// do sends one command and waits for its reply.
func (h *holder) do(c load.HoldCommand) (reply load.HoldReply, err error) {
	if err := h.commands.Encode(c); err != nil {
		return reply, fmt.Errorf("holder: %w", err)
	}
	if err := h.replies.Decode(&reply); err != nil {
		return reply, fmt.Errorf("holder: %w: %s", err, h.process.Log())
	}
	return reply, nil
}

// close ends the process, and its connections with it.
func (h *holder) close() {
	_ = h.in.Close()
	h.process.Stop()
}

// metrics reads the relay's Prometheus metrics without labels; nil if it has none.
func (s *stage) metrics() map[string]float64 {
	if text := s.metricsText(); text != "" {
		return parseMetrics(text)
	}
	return nil
}

// metricsText returns the relay's metrics, or "" where it has none or does not answer.
func (s *stage) metricsText() string {
	if s.relay.Metrics == "" {
		return ""
	}
	// One connection, opened on the node: the transport's own goroutines would
	// open it in another namespace.
	var conn net.Conn
	err := s.world.Node.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", s.relay.Metrics, time.Second)
		return err
	})
	if err != nil {
		return ""
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}}
	response, err := client.Get("http://" + s.relay.Metrics + "/metrics")
	if err != nil {
		_ = conn.Close()
		return ""
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return ""
	}
	return string(text)
}

func parseMetrics(text string) map[string]float64 {
	metrics := map[string]float64{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || strings.HasPrefix(name, "#") || strings.Contains(name, "{") {
			continue
		}
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			metrics[name] = v
		}
	}
	return metrics
}
