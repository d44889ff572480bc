// Package dev is what sluice dev does beside the proxy: it gathers manifests, and has the
// machine's programs find Services by their names.
package dev

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
)

// Sources returns the directory of manifests: the only argument if that is one, else a new
// one with symlinks to them.
func Sources(dir string, args []string) (string, error) {
	for i, arg := range args {
		info, err := os.Stat(arg)
		if err != nil {
			return "", err
		}
		full, err := filepath.Abs(arg)
		if err != nil {
			return "", err
		}
		if info.IsDir() && len(args) == 1 {
			return full, nil
		}
		name := filepath.Base(full)
		if ext := filepath.Ext(name); !info.IsDir() && !slices.Contains([]string{".yaml", ".yml", ".json"}, ext) {
			return "", fmt.Errorf("%s: its name ends in %q: manifests are *.yaml, *.yml and *.json", arg, ext)
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", err
		}
		link := filepath.Join(dir, name)
		if _, err := os.Lstat(link); err == nil {
			link = filepath.Join(dir, fmt.Sprintf("%d-%s", i+1, name))
		}
		if err := os.Symlink(full, link); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// Resolvers returns the name servers of a resolv.conf. One that cannot be read has none.
func Resolvers(path string) (list []netip.AddrPort) {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil && a.Zone() == "" {
			list = append(list, netip.AddrPortFrom(a, 53))
		}
	}
	return list
}

// The names of resolv.conf's of systemd-resolved in its directory.
const (
	resolvedDir = "/run/systemd/resolve"
	stub, plain = "stub-resolv.conf", "resolv.conf"
)

// WriteResolvConf writes a resolv.conf into a directory that CoverResolvConf takes. It has
// the search list of a pod in the namespace default.
func WriteResolvConf(dir, server, zone string) error {
	text := fmt.Sprintf("# of sluice dev\nnameserver %s\nsearch default.svc.%s svc.%s %s\noptions ndots:5\n", server, zone, zone, zone)
	for _, name := range []string{stub, plain} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
		if err := os.Chmod(filepath.Join(dir, name), 0o644); err != nil { // whatever the umask is
			return err
		}
	}
	return os.Chmod(dir, 0o755) // the command's programs may have other users
}

// CoverResolvConf has this process, whose mount namespace is its own, see the resolv.conf
// of a directory. It covers systemd-resolved's directory as well: the C library's module
// for it then finds no service, and leaves names to DNS.
func CoverResolvConf(dir string) error {
	if err := sys.KeepMounts(); err != nil {
		return err
	}
	const conf = "/etc/resolv.conf"
	target, err := filepath.EvalSymlinks(conf)
	if err != nil {
		return fmt.Errorf("%s: %w; a command cannot have one of its own without it", conf, err)
	}
	if _, err := os.Stat(resolvedDir); err == nil {
		if err := sys.Bind(dir, resolvedDir); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if filepath.Dir(target) == resolvedDir {
		return nil // covered
	}
	return sys.Bind(filepath.Join(dir, plain), target)
}

// Served returns a line for each port of the Services: name, address and endpoints.
func Served(snap *service.Snapshot, zone string) (lines []string) {
	for _, p := range snap.Ports {
		if p == nil {
			continue
		}
		for _, v := range p.Families {
			if !v.Exists || !v.ClusterIP.IsValid() {
				continue
			}
			var to []string
			for _, e := range v.Endpoints {
				to = append(to, e.Addr.String())
			}
			if len(to) == 0 {
				to = []string{"no endpoints: annotate the Service with sluice.dev/endpoints: 127.0.0.1:PORT"}
			}
			lines = append(lines, fmt.Sprintf("%s:%d %s %s -> %s", domain(p.Name.Name, zone), p.Port, strings.ToLower(p.Name.Protocol.String()), v.ClusterIP, strings.Join(to, ", ")))
		}
	}
	slices.Sort(lines)
	return lines
}

func domain(n service.Name, zone string) string {
	return n.Name + "." + n.Namespace + ".svc." + zone
}

// Hosts returns the lines of a hosts file for the cluster IPs of Services: the name in
// full, and without the zone.
func Hosts(snap *service.Snapshot, zone string) (lines []string) {
	for _, p := range snap.Ports {
		if p == nil {
			continue
		}
		for _, v := range p.Families {
			if v.Exists && v.ClusterIP.IsValid() {
				n := p.Name.Name
				line := fmt.Sprintf("%s %s %s.%s.svc %s.%s", v.ClusterIP, domain(n, zone), n.Name, n.Namespace, n.Name, n.Namespace)
				if n.Namespace == "default" {
					line += " " + n.Name
				}
				if !slices.Contains(lines, line) {
					lines = append(lines, line)
				}
			}
		}
	}
	slices.Sort(lines)
	return lines
}
