//go:build programs

package programs

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// resolvedRoot has Debian's systemd-resolved, which is not installed: its package takes
// /etc/resolv.conf over.
const resolvedRoot = "../../.cache/systemd-resolved"

// developer is a machine with a mount namespace: /run, /etc/resolv.conf and /etc/hosts are
// its own.
type developer struct {
	t       *testing.T
	machine *netns.Namespace
	mounts  string   // path of the mount namespace
	root    string   // of systemd-resolved's files
	env     []string // of all commands
}

// machineSetup makes the machine's files. The user of systemd-resolved may not exist.
const machineSetup = `
mount -t tmpfs none /run
mkdir -p /run/dbus /run/systemd/system /run/systemd/resolve
own() { target=$(readlink -f "$1"); mkdir -p "$(dirname "$target")"; touch "$target"; cat >"/run/$2"; mount --bind "/run/$2" "$target"; }
{ cat /etc/passwd; id systemd-resolve >/dev/null 2>&1 || echo 'systemd-resolve:x:993:993::/:/usr/sbin/nologin'; } | own /etc/passwd passwd
{ cat /etc/group; getent group systemd-resolve >/dev/null || echo 'systemd-resolve:x:993:'; } | own /etc/group group
printf '127.0.0.1 localhost\n' | own /etc/hosts hosts
printf 'hosts: files dns\n' | own /etc/nsswitch.conf nsswitch
printf 'nameserver %s\n' "$1" | own /etc/resolv.conf conf
chown systemd-resolve:systemd-resolve /run/systemd/resolve
cat >/run/dbus.conf <<X
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><listen>unix:path=/run/dbus/system_bus_socket</listen><auth>EXTERNAL</auth>
<policy context="default"><allow user="*"/><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>
X
touch /run/up
exec sleep infinity
`

// newDeveloper makes a machine whose resolver is at an address.
func newDeveloper(t *testing.T, resolver string) *developer {
	t.Helper()
	d := &developer{t: t, machine: netns.New(t, "machine")}
	var err error
	if d.root, err = filepath.Abs(resolvedRoot); err != nil {
		t.Fatal(err)
	}
	d.env = append(os.Environ(), "TMPDIR="+t.TempDir(),
		"PATH="+d.root+"/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"LD_LIBRARY_PATH="+d.root+"/usr/lib/x86_64-linux-gnu/systemd")
	for _, line := range []string{
		"link add eth0 type veth peer name wall", "link set wall up", "link set eth0 up",
		"address add 192.0.2.7/24 dev eth0", "route add default via 192.0.2.1",
	} {
		must.Run(t, d.machine.Command(t, "ip", strings.Fields(line)...))
	}
	holder := d.machine.Command(t, "unshare", "--mount", "--propagation", "private", "bash", "-euc", machineSetup, "setup", resolver)
	var log output.Text
	holder.Stdout, holder.Stderr = &log, &log
	must.OK(t, holder.Start())
	d.mounts = fmt.Sprintf("/proc/%d/ns/mnt", holder.Process.Pid)
	wait.For(t, "the machine's files", wait.Patience, func() error {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/run/up", holder.Process.Pid)); err != nil {
			return fmt.Errorf("%w: %s", err, &log)
		}
		return nil
	})
	return d
}

// command is a command on the machine.
func (d *developer) command(name string, args ...string) *netns.Cmd {
	c := d.machine.Command(d.t, "nsenter", append([]string{"--mount=" + d.mounts, "--", name}, args...)...)
	c.Env = d.env
	return c
}

// start runs a program until the test ends.
func (d *developer) start(log *output.Text, name string, args ...string) *netns.Cmd {
	d.t.Helper()
	c := d.command(name, args...)
	c.Stdout, c.Stderr = log, log
	must.OK(d.t, c.Start())
	return c
}

// says waits for the output of a command.
func (d *developer) says(want string, name string, args ...string) {
	d.t.Helper()
	wait.For(d.t, fmt.Sprintf("%s %v says %q", name, args, want), time.Minute, func() error {
		out, err := d.command(name, args...).CombinedOutput()
		if text := strings.TrimSpace(string(out)); err == nil && text != want {
			err = errors.New(text)
		}
		return err
	})
}

// process is a program of the developer, which answers by HTTP with its name.
func (d *developer) process(name, at string) (end func()) {
	d.t.Helper()
	l := must.Get(d.machine.Listen("tcp", at))(d.t)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%s for %s", name, r.Host) })}
	go func() { _ = s.Serve(l) }()
	end = func() { _ = s.Close() }
	d.t.Cleanup(end)
	return end
}

// state is what must be as before at the end.
func (d *developer) state(more string) string {
	d.t.Helper()
	const look = `ip -o link | sed 's/ state .*//'; ip rule; ip -6 rule; for f in -4 -6; do ip $f route show table all | grep -v ' dev eth0 \| dev wall ' || true; done
ip -o address show scope global | sed 's/valid_lft.*//'; nft list ruleset
for f in /etc/hosts /etc/resolv.conf /etc/nsswitch.conf; do echo $f; cat $f; done; find /run -not -path '/run/systemd/*' | sort; ls "$TMPDIR"; `
	out, err := d.command("bash", "-euc", look+more).CombinedOutput()
	if err != nil {
		d.t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

const devService = `apiVersion: v1
kind: Service
metadata: {name: %s, namespace: shop, annotations: {sluice.dev/endpoints: "%s"}}
spec: {selector: {app: x}, ports: [{name: http, port: 80}]}
`

// TestNewcomer plays a developer's first minutes: three files without cluster IPs, processes
// on loopback, one command as root. All programs of the machine find the names, by
// systemd-resolved or by the hosts file. Then there are an edit, a process that dies, and
// Ctrl-C, after which nothing is left.
func TestNewcomer(t *testing.T) {
	sluice, err := filepath.Abs(os.Getenv("SLUICE_BIN"))
	if err != nil || os.Getenv("SLUICE_BIN") == "" {
		t.Fatal("SLUICE_BIN is not set: use make test-programs")
	}
	for _, row := range []struct {
		way, resolver string
		flags         []string
		more          string // of the state
	}{
		{"systemd-resolved", "127.0.0.53", nil, "resolvectl domain; resolvectl dns"},
		{"hosts file", "192.0.2.53", []string{"--hosts-file"}, ""},
	} {
		t.Run(row.way, func(t *testing.T) {
			t.Parallel()
			d := newDeveloper(t, row.resolver)
			var log output.Text
			if row.more != "" {
				d.start(&log, debian.Find(t, "dbus-daemon"), "--nofork", "--nopidfile", "--config-file=/run/dbus.conf")
				wait.For(t, "the bus is there", wait.Patience, func() error { return d.command("test", "-S", "/run/dbus/system_bus_socket").Run() })
				d.start(&log, d.root+"/lib/systemd/systemd-resolved")
				wait.For(t, "systemd-resolved answers", time.Minute, func() error {
					out, err := d.command("resolvectl", "status").CombinedOutput()
					if err != nil {
						return fmt.Errorf("%w: %s%s", err, out, &log)
					}
					return nil
				})
			}
			before := d.state(row.more)

			files := t.TempDir()
			write := func(name, endpoints string) {
				t.Helper()
				must.OK(t, os.WriteFile(filepath.Join(files, name+".yaml"), []byte(fmt.Sprintf(devService, name, endpoints)), 0o600))
			}
			write("web", "127.0.0.1:3000")
			write("api", "127.0.0.1:3001")
			write("db", "127.0.0.1:3002")
			d.process("web", "127.0.0.1:3000")
			d.process("api", "127.0.0.1:3001")
			d.process("db", "127.0.0.1:3002")

			dev := d.start(&log, sluice, append([]string{"dev", files}, row.flags...)...)
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("sluice said:\n%s", &log)
				}
			})
			curl := func(want, url string) {
				t.Helper()
				d.says(want, "curl", "--silent", "--show-error", "--max-time", "20", url)
			}
			curl("web for web.shop.svc.cluster.local", "http://web.shop.svc.cluster.local/")
			curl("api for api.shop.svc.cluster.local", "http://api.shop.svc.cluster.local/")
			d.says("NXDOMAIN", "bash", "-c", "dig @127.83.76.53 none.shop.svc.cluster.local | sed -n 's/.*status: \\([A-Z]*\\).*/\\1/p'")
			// What dig and getent say of a name is what sluice hosts prints.
			d.says("same", "bash", "-c", `set -e
ip=$(`+sluice+` hosts `+files+` | awk '$2 == "db.shop.svc.cluster.local" {print $1}'); test -n "$ip"
test "$(getent ahosts db.shop.svc.cluster.local | awk '/STREAM/ {print $1}')" = "$ip"
for how in "" +tcp +noedns; do test "$(dig @127.83.76.53 $how +short db.shop.svc.cluster.local)" = "$ip"; done
test "$(dig @127.83.76.53 +short -x $ip)" = db.shop.svc.cluster.local.
test "$(dig @127.83.76.53 +short _http._tcp.db.shop.svc.cluster.local srv)" = "0 100 80 db.shop.svc.cluster.local."
test "$(dig @127.83.76.53 +short dns-version.cluster.local txt)" = '"1.1.0"'
echo same`)

			d.process("api, the second", "127.0.0.1:3003")
			write("api", "127.0.0.1:3003")
			curl("api, the second for api.shop.svc.cluster.local", "http://api.shop.svc.cluster.local/")

			end := d.process("web, the second", "127.0.0.1:3004")
			write("web", "127.0.0.1:3000, 127.0.0.1:3004")
			curl("web, the second for web.shop.svc.cluster.local", "http://web.shop.svc.cluster.local/")
			end()
			for range 6 {
				out, err := d.command("curl", "--silent", "--show-error", "--max-time", "20", "http://web.shop.svc.cluster.local/").CombinedOutput()
				if want := "web for web.shop.svc.cluster.local"; err != nil || string(out) != want {
					t.Errorf("with a dead process: %v: %s", err, out)
				}
			}

			must.OK(t, dev.Process.Signal(syscall.SIGINT))
			if err := dev.Wait(); err != nil {
				t.Errorf("it ended with %v", err)
			}
			check.Textf(t, d.state(row.more), before, "it has left")
		})
	}
}
