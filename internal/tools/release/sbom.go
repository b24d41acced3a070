package main

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"net/url"
	"strings"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"pault.ag/go/debian/deb"
)

// part is a file of a release, or an image, that has an SBOM.
type part struct {
	name, hash string // the hash is a SHA-256 in hexadecimal digits
	purl       string
	purpose    string // one of SPDX's
}

// sbom lists what is in a part of the release as SPDX JSON: the Go modules in its programs, and the
// Debian packages.
func (r release) sbom(p part, programs []string, packages []deb.Control) ([]byte, error) {
	doc := &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName:      p.name,
		DocumentNamespace: source + "/sbom/" + p.name + "/" + p.hash,
		CreationInfo: &spdx.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "slicecast-release"}},
			Created:  r.created.Format("2006-01-02T15:04:05Z"),
		},
	}
	add := func(name, version, purl string) *spdx.Package {
		p := &spdx.Package{
			PackageName: name, PackageVersion: version, PackageDownloadLocation: "NOASSERTION",
			PackageSPDXIdentifier: common.ElementID(fmt.Sprintf("Package-%d", len(doc.Packages))),
			PackageExternalReferences: []*spdx.PackageExternalReference{{
				Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: purl,
			}},
		}
		of, relation := doc.SPDXIdentifier, common.TypeRelationshipDescribe
		if len(doc.Packages) > 0 {
			of, relation = doc.Packages[0].PackageSPDXIdentifier, common.TypeRelationshipContains
		}
		doc.Packages = append(doc.Packages, p)
		doc.Relationships = append(doc.Relationships, &spdx.Relationship{
			RefA:         common.DocElementID{ElementRefID: of},
			RefB:         common.DocElementID{ElementRefID: p.PackageSPDXIdentifier},
			Relationship: relation,
		})
		return p
	}
	whole := add(p.name, r.version, p.purl)
	whole.PrimaryPackagePurpose = p.purpose
	whole.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: p.hash}}
	listed := make(map[string]bool) // several programs have most modules in common
	module := func(path, version string) {
		if p := purl("golang/"+path, version); !listed[p] {
			listed[p] = true
			add(path, version, p)
		}
	}
	for _, program := range programs {
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			return nil, err
		}
		module(info.Main.Path, r.version)
		module("stdlib", strings.TrimPrefix(info.GoVersion, "go"))
		for _, m := range info.Deps {
			module(m.Path, m.Version)
		}
	}
	for _, p := range packages {
		origin, _, _ := strings.Cut(p.SourceName(), " ")
		add(p.Package, p.Version.String(), fmt.Sprintf("%s?arch=%s&distro=debian-13&upstream=%s",
			purl("deb/debian/"+p.Package, p.Version.String()), p.Architecture.String(), url.QueryEscape(origin)))
	}
	var out bytes.Buffer
	err := spdxjson.Write(doc, &out, spdxjson.Indent("  "))
	return out.Bytes(), err
}

// purl returns a package URL.
func purl(path, version string) string {
	return "pkg:" + strings.ReplaceAll(path, "+", "%2B") + "@" + strings.ReplaceAll(url.PathEscape(version), "+", "%2B")
}
