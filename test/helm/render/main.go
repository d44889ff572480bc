// Command render prints the objects of the Helm chart in deploy/ for a file of
// values. Tests use it in place of the program helm, which takes minutes to build.
//
//	render -chart deploy/helm/sluice -release sluice -values eks.yaml [-server https://… -token …]
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/helm/chart"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func run() error {
	folder := flag.String("chart", "", "folder of the chart")
	file := flag.String("values", "", "file of values")
	server := flag.String("server", "", "API server in which lookup finds objects, whatever its certificate")
	token := flag.String("token", "", "token for it")
	r := chart.Release{}
	flag.StringVar(&r.Name, "release", "sluice", "name of the release")
	flag.StringVar(&r.Namespace, "namespace", "kube-system", "its namespace")
	flag.Parse()
	if *file != "" {
		text, err := os.ReadFile(*file)
		if err != nil {
			return err
		}
		if err := yaml.UnmarshalStrict(text, &r.Values); err != nil {
			return fmt.Errorf("%s: %w", *file, err)
		}
	}
	if *server != "" {
		r.Server = &rest.Config{Host: *server, BearerToken: *token, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	}
	objects, err := chart.Render(*folder, r)
	if err != nil {
		return err
	}
	fmt.Println(strings.Join(objects, "---\n"))
	return nil
}
