package main

import (
	"bytes"
	"crypto/sha1" //nolint:gosec // SPDX wants it beside SHA-256
	"crypto/sha256"
	"fmt"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

const (
	noAssertion = "NOASSERTION"
	project     = "https://github.com/sluice-proxy/sluice"
)

// bill returns the SBOM of a program, SPDX 2.3 as JSON: Go and the modules that the
// linker has recorded in the binary.
func (r *release) bill(p program) ([]byte, error) {
	sum256, sum1 := fmt.Sprintf("%x", sha256.Sum256(p.binary)), fmt.Sprintf("%x", sha1.Sum(p.binary)) //nolint:gosec // as above
	own := modulePackage("sluice", &debug.Module{Path: p.info.Main.Path, Version: r.version})
	own.PackageLicenseDeclared, own.PackageLicenseConcluded = "Apache-2.0", "Apache-2.0"
	own.PackageDownloadLocation = project
	own.PrimaryPackagePurpose = "APPLICATION"
	own.FilesAnalyzed = false
	binary := &v2_3.File{
		FileName: "./sluice", FileSPDXIdentifier: "File-sluice", FileTypes: []string{"BINARY"},
		Checksums:        []common.Checksum{{Algorithm: common.SHA256, Value: sum256}, {Algorithm: common.SHA1, Value: sum1}},
		LicenseConcluded: "Apache-2.0", FileCopyrightText: noAssertion,
	}
	d := &v2_3.Document{
		SPDXVersion: v2_3.Version, DataLicense: v2_3.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName: r.name(p.arch), DocumentNamespace: project + "/spdx/" + r.name(p.arch) + "-" + sum256,
		CreationInfo: &v2_3.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "sluice-tools-release"}}, Created: r.date.Format(time.RFC3339),
		},
		Packages: []*v2_3.Package{own},
		Files:    []*v2_3.File{binary},
	}
	relate := func(from common.ElementID, how string, to common.ElementID) {
		d.Relationships = append(d.Relationships, &v2_3.Relationship{
			RefA: common.DocElementID{ElementRefID: from}, RefB: common.DocElementID{ElementRefID: to}, Relationship: how,
		})
	}
	relate("DOCUMENT", common.TypeRelationshipDescribe, own.PackageSPDXIdentifier)
	relate(own.PackageSPDXIdentifier, common.TypeRelationshipContains, binary.FileSPDXIdentifier)
	modules := append([]*debug.Module{{Path: "stdlib", Version: strings.TrimPrefix(p.info.GoVersion, "go")}}, p.info.Deps...)
	for _, m := range modules {
		if m.Replace != nil {
			m = m.Replace
		}
		module := modulePackage(m.Path, m)
		d.Packages = append(d.Packages, module)
		relate(own.PackageSPDXIdentifier, common.TypeRelationshipDependsOn, module.PackageSPDXIdentifier)
	}
	var out bytes.Buffer
	err := spdxjson.Write(d, &out, spdxjson.Indent("  "), spdxjson.EscapeHTML(false))
	return out.Bytes(), err
}

var notInIDs = regexp.MustCompile(`[^A-Za-z0-9.]+`)

// modulePackage describes a module of Go.
func modulePackage(name string, m *debug.Module) *v2_3.Package {
	p := &v2_3.Package{
		PackageName: name, PackageVersion: m.Version,
		PackageSPDXIdentifier:   common.ElementID("Package-" + notInIDs.ReplaceAllString(m.Path+"-"+m.Version, "-")),
		PackageDownloadLocation: noAssertion, FilesAnalyzed: false, IsFilesAnalyzedTagPresent: true,
		PackageLicenseConcluded: noAssertion, PackageLicenseDeclared: noAssertion, PackageCopyrightText: noAssertion,
		PackageExternalReferences: []*v2_3.PackageExternalReference{{
			Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: "pkg:golang/" + m.Path + "@" + m.Version,
		}},
	}
	if m.Sum != "" {
		p.PackageSourceInfo = "go.sum " + m.Sum
	}
	return p
}
