package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

const chromium = "/usr/bin/chromium"

// browser is a headless chromium with one page, which obeys through a pipe: messages of
// JSON that end with a zero.
type browser struct {
	cmd     *exec.Cmd
	to      *os.File
	from    *bufio.Reader
	session string // of its page
	number  int
}

// openBrowser starts a browser with its files in a directory.
func openBrowser(dir string) (_ *browser, err error) {
	in, to, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	from, out, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, to.Close())
	}
	defer out.Close()
	b := &browser{to: to, from: bufio.NewReader(from)}
	b.cmd = exec.Command(chromium, "--headless", "--no-sandbox", "--remote-debugging-pipe", "--user-data-dir="+dir, "--window-size=1440,900",
		"--no-first-run", "--disable-background-networking", "--disable-extensions", "--disable-sync", "--disable-dev-shm-usage", "about:blank")
	b.cmd.ExtraFiles = []*os.File{in, out} // 3 and 4, as the flag wants
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := b.cmd.Start(); err != nil {
		return nil, errors.Join(err, to.Close())
	}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	var targets struct {
		TargetInfos []struct {
			TargetID string `json:"targetId"`
			Type     string `json:"type"`
		} `json:"targetInfos"`
	}
	for deadline := time.Now().Add(pagePatience); ; time.Sleep(20 * time.Millisecond) {
		if err := b.ask("Target.getTargets", nil, &targets); err != nil {
			return nil, err
		}
		for _, t := range targets.TargetInfos {
			if t.Type != "page" {
				continue
			}
			var attached struct {
				SessionID string `json:"sessionId"`
			}
			err := b.ask("Target.attachToTarget", map[string]any{"targetId": t.TargetID, "flatten": true}, &attached)
			b.session = attached.SessionID
			return b, err
		}
		if time.Now().After(deadline) {
			return nil, errors.New("chromium has no page")
		}
	}
}

func (b *browser) pid() int { return b.cmd.Process.Pid }

// close ends the browser and its processes.
func (b *browser) close() {
	_ = b.to.Close()
	_ = syscall.Kill(-b.pid(), syscall.SIGKILL) // its own group
	_ = b.cmd.Wait()
}

// ask sends a command and reads its answer.
func (b *browser) ask(method string, params, answer any) error {
	b.number++
	order := map[string]any{"id": b.number, "method": method, "params": params}
	if params == nil {
		delete(order, "params")
	}
	if b.session != "" {
		order["sessionId"] = b.session
	}
	text, err := json.Marshal(order)
	if err != nil {
		return err
	}
	if _, err := b.to.Write(append(text, 0)); err != nil {
		return err
	}
	for {
		line, err := b.from.ReadBytes(0)
		if err != nil {
			return fmt.Errorf("chromium: %w", err)
		}
		var m struct {
			ID     int
			Result json.RawMessage
			Error  *struct{ Message string }
		}
		if err := json.Unmarshal(line[:len(line)-1], &m); err != nil {
			return err
		}
		switch {
		case m.ID != b.number: // an event
		case m.Error != nil:
			return fmt.Errorf("chromium: %s: %s", method, m.Error.Message)
		case answer == nil:
			return nil
		default:
			return json.Unmarshal(m.Result, answer)
		}
	}
}

// visit opens an address anew.
func (b *browser) visit(url string) error {
	if err := b.ask("Page.navigate", map[string]any{"url": "about:blank"}, nil); err != nil || url == "about:blank" {
		return err
	}
	return b.ask("Page.navigate", map[string]any{"url": url}, nil)
}

// await waits until an expression is true.
func (b *browser) await(expression string) error {
	for deadline := time.Now().Add(pagePatience); ; time.Sleep(50 * time.Millisecond) {
		var answer struct {
			Result struct{ Value any }
		}
		if err := b.ask("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &answer); err != nil {
			return err
		}
		if answer.Result.Value == true {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not so after %v", expression, pagePatience)
		}
	}
}
