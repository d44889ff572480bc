package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestLogInAFIFOThatNobodyReads has the access log in a FIFO without a reader. The
// proxy must start, take SIGHUP, apply changes and stop, and a reader that opens
// the FIFO later gets the records.
func TestLogInAFIFOThatNobodyReads(t *testing.T) {
	t.Parallel()
	for _, readAtStart := range []bool{true, false} {
		t.Run(fmt.Sprintf("read at the start %v", readAtStart), func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			web := webOn(lab)
			p := prepareProxy(t, lab, []webService{web})
			fifo := filepath.Join(t.TempDir(), "log")
			must.OK(t, unix.Mkfifo(fifo, 0o600))
			var reader *os.File
			if readAtStart {
				reader = openFIFO(t, fifo)
			}
			p.start("--access-log", fifo)
			if reader != nil {
				reader.Close()
			}
			p.signal(syscall.SIGHUP)
			other := web
			other.name, other.vips = "other", []string{"10.96.0.11", "fd00:96::11"}
			p.apply(other)
			wait.For(t, "a change after SIGHUP is in force", startTimeout, func() error {
				_, err := lab.Client.Ask("tcp", addresses(80, other.vips...)[0])
				return err
			})
			reader = openFIFO(t, fifo)
			must.OK(t, ask(lab.Client, addresses(80, vip4)[0]).err)
			_ = reader.SetReadDeadline(time.Now().Add(startTimeout))
			for lines := bufio.NewScanner(reader); ; {
				if !lines.Scan() {
					t.Fatalf("no record of the last connection: %v", lines.Err())
				}
				if strings.Contains(lines.Text(), `"vip":"`+vip4+`:80"`) {
					break
				}
			}
			reader.Close()
			p.signal(syscall.SIGHUP)
			p.stop()
		})
	}
}

// openFIFO opens a FIFO for reading without waiting for a writer.
func openFIFO(t *testing.T, name string) *os.File {
	t.Helper()
	f := must.Get(os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0))(t)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// TestFullOutputPipeBlocksNothing has standard output, with the access log, and
// standard error in one full pipe without a reader. The proxy must serve Services,
// apply changes, and on SIGTERM exit and remove its routes.
func TestFullOutputPipeBlocksNothing(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	web := webOn(lab)
	p := prepareProxy(t, lab, []webService{web})
	r, w, err := os.Pipe()
	must.OK(t, err)
	defer r.Close()
	fill(t, w)
	cmd := exec.Command(built(t), "run", "--manifests", p.manifests, "--hostname-override", "node", "--service-cidr", serviceCIDRs, "--v", "4")
	cmd.Stdout, cmd.Stderr = w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must.OK(t, lab.Node.Do(cmd.Start))
	w.Close()
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	served := func(s webService) {
		t.Helper()
		wait.For(t, s.name+" is served", readyTimeout, func() error {
			_, err := lab.Client.Ask("tcp", addresses(80, s.vips...)[0])
			return err
		})
	}
	served(web)
	other := web
	other.name, other.vips = "other", []string{"10.96.0.11", "fd00:96::11"}
	p.apply(other)
	served(other)
	must.OK(t, cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-exited:
	case <-time.After(stopTimeout):
		t.Fatalf("sluice did not end within %v", stopTimeout)
	}
	for _, address := range addresses(80, web.vips...) {
		if c, err := lab.Client.Dial("tcp", address); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("%s after the end: %v, %v; want no route", address, c, err)
		}
	}
}

// fill writes to a pipe until it is full. The next writer then blocks.
func fill(t *testing.T, w *os.File) {
	t.Helper()
	fd := int(w.Fd())
	must.OK(t, unix.SetNonblock(fd, true))
	for {
		if _, err := unix.Write(fd, make([]byte, 4096)); errors.Is(err, unix.EAGAIN) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	must.OK(t, unix.SetNonblock(fd, false))
}

// TestHangupDuringTheStart sends SIGHUP continuously from the time when the proxy takes
// it, which must be before the packages of the API's types are made ready, until it is
// ready.
func TestHangupDuringTheStart(t *testing.T) {
	lab := netns.NewLab(t, 1)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	built(t)                           // without a line for each of the compiler's packages
	t.Setenv("GODEBUG", "inittrace=1") // a line when a package is ready
	p.launch()
	began := regexp.MustCompile(`(?m)^init \S+/internal/hangup `)
	wait.Until(t, "it takes SIGHUP", startTimeout, func() bool { return began.MatchString(p.stderr.String()) })
	wait.For(t, "sluice is ready", readyTimeout, func() error {
		select {
		case <-p.exited:
			t.Fatalf("it ended: %v", p.cmd.ProcessState)
		default:
		}
		p.signal(syscall.SIGHUP)
		if !p.stderr.Contains(`"message":"ready"`) {
			return errNotYet
		}
		return nil
	})
	text := p.stderr.String()
	if api := strings.Index(text, "init k8s.io/"); api < 0 || api < began.FindStringIndex(text)[0] {
		t.Errorf("SIGHUP is taken only after the API's types are ready:\n%s", text)
	}
	p.stop()
}
