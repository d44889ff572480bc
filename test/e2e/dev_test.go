package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// newcomerEnv has the test binary play the command behind sluice dev.
const newcomerEnv = "SLUICE_TEST_NEWCOMER"

func init() {
	if os.Getenv(newcomerEnv) != "" {
		if err := newcomer(); err != nil {
			fmt.Println("newcomer:", err)
			os.Exit(1)
		}
		os.Exit(7)
	}
}

// newcomer serves as api on loopback of both families, and asks for it by its names, as a
// program of a developer does.
func newcomer() error {
	for name, at := range map[string]string{"api": "127.0.0.1:3000", "api6": "[::1]:3000", "edited": "127.0.0.1:3001"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			return err
		}
		go func() {
			_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%s for %s", name, r.Host) }))
		}()
	}
	udp, err := net.ListenPacket("udp", "127.0.0.1:3053")
	if err != nil {
		return err
	}
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(append([]byte("echo "), b[:n]...), from)
		}
	}()
	for _, url := range []string{"http://api.shop.svc.cluster.local/", "http://api.shop/", "http://api6.shop/"} {
		out, err := exec.Command("curl", "--silent", "--show-error", "--max-time", "30", url).CombinedOutput()
		fmt.Printf("curl %s: %s %v\n", url, out, err)
	}
	out, err := exec.Command("getent", "ahostsv4", "api.shop").Output()
	address, _, _ := strings.Cut(string(out), " ")
	fmt.Printf("getent: %t %v\n", strings.HasPrefix(address, "10.96."), err)
	_, err = net.LookupHost("nothing.shop.svc.cluster.local.")
	fmt.Printf("nothing: %t\n", err != nil)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", "clock.shop:53")
	if err != nil {
		return err
	}
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	b := make([]byte, 100)
	if _, err = c.Write([]byte("tick")); err != nil {
		return err
	}
	n, err := c.Read(b)
	fmt.Printf("udp: %s %v\n", b[:n], err)
	return editManifest()
}

// editManifest makes another process that of api, and waits until it answers.
func editManifest() error {
	file := os.Getenv(newcomerEnv)
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, bytes.Replace(text, []byte("127.0.0.1:2999, 127.0.0.1:3000"), []byte("127.0.0.1:3001"), 1), 0o644); err != nil {
		return err
	}
	return wait.Poll(startTimeout, func() error {
		out, err := exec.Command("curl", "--silent", "--show-error", "--max-time", "30", "http://api.shop/").CombinedOutput()
		if err == nil && string(out) != "edited for api.shop" {
			err = fmt.Errorf("after the edit: %s", out)
		}
		return err
	})
}

const devManifests = `
apiVersion: v1
kind: Service
metadata: {name: api, namespace: shop, annotations: {sluice.dev/endpoints: "127.0.0.1:2999, 127.0.0.1:3000"}}
spec: {selector: {app: api}, ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: api, namespace: shop}
spec: {replicas: 2}
---
apiVersion: v1
kind: Service
metadata: {name: api6, namespace: shop, annotations: {sluice.dev/endpoints: "[::1]:3000"}}
spec: {ipFamilies: [IPv6], ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: clock, namespace: shop, annotations: {sluice.dev/endpoints: "127.0.0.1:3053"}}
spec: {ports: [{port: 53, protocol: UDP}]}
`

const newcomerSays = `curl http://api.shop.svc.cluster.local/: api for api.shop.svc.cluster.local <nil>
curl http://api.shop/: api for api.shop <nil>
curl http://api6.shop/: api6 for api6.shop <nil>
getent: true <nil>
nothing: true
udp: echo tick <nil>
`

// devFiles returns a directory that everybody may read, with the program, the test binary
// and the manifests.
func devFiles(t *testing.T) (dir, sluice, player string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-newcomer-")
	must.OK(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self := must.Get(os.Executable())(t)
	sluice, player = filepath.Join(dir, "sluice"), filepath.Join(dir, "player")
	for to, from := range map[string]string{sluice: built(t), player: self} {
		must.Run(t, exec.Command("cp", from, to))
	}
	must.OK(t, os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(devManifests), 0o644))
	must.OK(t, os.Chmod(dir, 0o755))
	return dir, sluice, player
}

// TestDevServesACommand plays a newcomer, as root on the machine and as nobody in a network
// of its own: manifests without cluster IPs, processes on loopback, one of which is dead,
// one command, and an edit. Names are found by curl, getent and Go. Nothing is left.
func TestDevServesACommand(t *testing.T) {
	t.Parallel()
	dir, sluice, player := devFiles(t)
	for who, prefix := range map[string][]string{"root": nil, "nobody": {"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}} {
		t.Run(who, func(t *testing.T) {
			machine := newMachine(t)
			before := machineState(t, machine)
			file := filepath.Join(dir, who+".yaml")
			must.OK(t, os.WriteFile(file, []byte(devManifests), 0o600))
			must.OK(t, os.Chmod(file, 0o666))
			args := append(prefix, sluice, "dev", file, "--web=off", "--", player)
			cmd := machine.Command(t, args[0], args[1:]...)
			temp := filepath.Join(dir, who)
			must.OK(t, os.Mkdir(temp, 0o700))
			must.OK(t, os.Chmod(temp, 0o777))
			cmd.Env = append(os.Environ(), newcomerEnv+"="+file, "TMPDIR="+temp)
			var said, log bytes.Buffer
			cmd.Stdout, cmd.Stderr = &said, &log
			err := cmd.Run()
			if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 7 {
				t.Errorf("it ended with %v\n%s", err, log.String())
			}
			var lines strings.Builder
			records := 0
			for line := range strings.Lines(said.String()) {
				if strings.Contains(line, " -> ") {
					records++ // of the access log
				} else {
					lines.WriteString(line)
				}
			}
			check.Textf(t, lines.String(), newcomerSays, "%s\nits lines", &log)
			if records < 5 { // 4, and those after the edit
				t.Errorf("%d records of 5 connections at least:\n%s", records, said.String())
			}
			check.Textf(t, machineState(t, machine), before, "it has left")
			if left, _ := os.ReadDir(temp); len(left) > 0 {
				t.Errorf("it has left %v", left)
			}
		})
	}
}

// newMachine returns a namespace with an address of each family and default routes, as a
// developer's machine has them.
func newMachine(t *testing.T) *netns.Namespace {
	t.Helper()
	machine := netns.New(t, "machine")
	for _, line := range []string{
		"link add eth0 type veth peer name wall", "link set wall up", "link set eth0 up",
		"address add 192.0.2.7/24 dev eth0", "route add default via 192.0.2.1",
		"address add 2001:db8::7/64 dev eth0 nodad", "-6 route add default via 2001:db8::1",
	} {
		must.Run(t, machine.Command(t, "ip", strings.Fields(line)...))
	}
	return machine
}

// machineState returns the rules, routes and tables of a namespace.
func machineState(t *testing.T, n *netns.Namespace) string {
	t.Helper()
	var all strings.Builder
	for _, args := range [][]string{{"ip", "rule"}, {"ip", "-6", "rule"}, {"ip", "route", "show", "table", "all"}, {"ip", "-6", "route", "show", "table", "all"}, {"nft", "list", "ruleset"}} {
		out, err := n.Command(t, args[0], args[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
		for line := range strings.Lines(string(out)) {
			// The kernel adds the links' routes at its own pace; Sluice's are at lo.
			if !strings.Contains(line, " dev eth0 ") && !strings.Contains(line, " dev wall ") {
				all.WriteString(line)
			}
		}
	}
	return all.String()
}

// TestDevKeepsAHostsFile serves the machine without a command: names are in the hosts file
// until SIGINT, and follow an edit.
func TestDevKeepsAHostsFile(t *testing.T) {
	t.Parallel()
	dir, sluice, _ := devFiles(t)
	machine := newMachine(t)
	hosts := filepath.Join(dir, "hosts")
	const own = "127.0.0.1 localhost"
	must.OK(t, os.WriteFile(hosts, []byte(own+"\n# sluice dev: these lines go when it ends\n10.0.0.1 of-a-killed-one\n# sluice dev: end\n"), 0o644))
	cmd := machine.Command(t, sluice, "dev", "--hosts-file="+hosts, dir, "--web=off")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.Discard, &log
	must.OK(t, cmd.Start())
	has := func(text string, want bool) {
		t.Helper()
		wait.For(t, fmt.Sprintf("the hosts file with %q %t", text, want), startTimeout, func() error {
			data, err := os.ReadFile(hosts)
			if err == nil && strings.Contains(string(data), text) != want {
				err = fmt.Errorf("%s", data)
			}
			return err
		})
	}
	has(" api.shop.svc.cluster.local api.shop.svc api.shop\n", true)
	has("of-a-killed-one", false)
	text := "apiVersion: v1\nkind: Service\nmetadata: {name: late}\nspec: {clusterIP: 10.96.9.9, ports: [{port: 80}]}\n"
	must.OK(t, os.WriteFile(filepath.Join(dir, "late.yaml"), []byte(text), 0o644))
	has("\n10.96.9.9 late.default.svc.cluster.local late.default.svc late.default late\n", true)
	must.OK(t, cmd.Process.Signal(os.Interrupt))
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ended with %v\n%s", err, log.String())
	}
	if data, err := os.ReadFile(hosts); err != nil || string(data) != own+"\n" {
		t.Errorf("the hosts file is left as %q, %v", data, err)
	}
}

// TestDevWithoutRights says what to do.
func TestDevWithoutRights(t *testing.T) {
	dir, sluice, _ := devFiles(t)
	out, err := exec.Command("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sluice, "dev", dir).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "give a command") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestDevDataPaths serves what containers on a bridge have: clients on other hosts, endpoints
// there and processes of the machine. The kernel forwards what the machine forwards; the
// rest is relayed. A dead endpoint costs a retry on both data paths. Nothing is left at the
// interfaces.
func TestDevDataPaths(t *testing.T) {
	t.Parallel()
	for datapath, path := range map[string]string{"auto": "kernel", "kernel": "kernel", "relay": "relay"} {
		t.Run(datapath, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			lab.Node.EchoTCPAt(t, "127.0.0.1:3000")
			file := filepath.Join(t.TempDir(), "dev.yaml")
			const away, here = "10.96.0.9", "10.96.0.8"
			var text strings.Builder
			for vip, endpoints := range map[string]string{
				away: fmt.Sprintf("%[1]s:8081, %[1]s:8080", lab.Backends[0].IPv4), here: "127.0.0.1:2999, 127.0.0.1:3000",
			} {
				fmt.Fprintf(&text, "apiVersion: v1\nkind: Service\nmetadata: {name: s%s, annotations: {sluice.dev/endpoints: %q}}\n"+
					"spec: {clusterIP: %s, ports: [{port: 80}]}\n---\n", strings.ReplaceAll(vip, ".", "-"), endpoints, vip)
			}
			must.OK(t, os.WriteFile(file, []byte(text.String()), 0o600))
			cmd := lab.Node.Command(t, built(t), "dev", file, "--web=off", "--dns=off", "--datapath="+datapath)
			var log bytes.Buffer
			cmd.Stdout, cmd.Stderr = io.Discard, &log
			must.OK(t, cmd.Start())
			wait.For(t, "the data path is "+path, startTimeout, func() error {
				if out, err := sluice(t, lab, "status"); err != nil || !regexp.MustCompile(`data path +`+path).MatchString(out) {
					return fmt.Errorf("%w: %s", err, out)
				}
				return nil
			})
			wait.For(t, "the data path of the node's own clients is known", startTimeout, func() error {
				out, err := sluice(t, lab, "status", "-o", "json")
				if err == nil && path == "kernel" && strings.Contains(out, "node_clients_relayed") {
					err = errors.New(out)
				}
				return err
			})
			want := make(map[string]int) // records of an address and a path
			for _, c := range []struct {
				from      *netns.Host
				vip, path string
			}{{lab.Client, away, path}, {lab.Client, here, "relay"}, {lab.Node, away, path}, {lab.Node, here, "relay"}} {
				for range 4 { // some begin with the dead endpoint
					must.OKf(t, must.Err(c.from.Ask("tcp", c.vip+":80")), "from %s to %s", c.from.Name(), c.vip)
				}
				want[c.vip+c.path] += 4
				wait.For(t, fmt.Sprintf("records from %s to %s with path %s", c.from.Name(), c.vip, c.path), time.Minute, func() error {
					out, err := sluice(t, lab, "log", "-o", "json", "path="+c.path)
					if n := strings.Count(out, fmt.Sprintf(`"vip":"%s:80"`, c.vip)); err != nil || n != want[c.vip+c.path] {
						return fmt.Errorf("%w, %d of %d:\n%s", err, n, want[c.vip+c.path], out)
					}
					return nil
				})
			}
			must.OK(t, cmd.Process.Signal(os.Interrupt))
			if err := cmd.Wait(); err != nil {
				t.Errorf("it ended with %v\n%s", err, log.String())
			}
			check.OK(t, lab.Node.Do(func() error { return hasNoPrograms("client", "b1") }))
		})
	}
}
