package main

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"net/url"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"pault.ag/go/debian/deb"
)

// sbom lists what is in an image as SPDX JSON: the Go modules in the program and the packages.
func (b *builder) sbom(i image, architecture string, img v1.Image, program string, packages []deb.Control) ([]byte, error) {
	digest, err := img.Digest()
	if err != nil {
		return nil, err
	}
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, err
	}
	doc := &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName:      i.name + "-" + architecture,
		DocumentNamespace: source + "/sbom/" + i.name + "/" + digest.Hex,
		CreationInfo: &spdx.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "slicecast-images"}},
			Created:  b.release.created.Format("2006-01-02T15:04:05Z"),
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
	whole := add(i.name, b.release.version, fmt.Sprintf("pkg:oci/%s@%s?arch=%s&repository_url=%s",
		i.name, url.QueryEscape(digest.String()), architecture, published+"/"+i.name))
	whole.PrimaryPackagePurpose = "CONTAINER"
	whole.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: digest.Hex}}
	add(info.Main.Path, b.release.version, purl("golang/"+info.Main.Path, b.release.version))
	add("stdlib", strings.TrimPrefix(info.GoVersion, "go"), purl("golang/stdlib", strings.TrimPrefix(info.GoVersion, "go")))
	for _, m := range info.Deps {
		add(m.Path, m.Version, purl("golang/"+m.Path, m.Version))
	}
	for _, p := range packages {
		origin, _, _ := strings.Cut(p.SourceName(), " ")
		add(p.Package, p.Version.String(), fmt.Sprintf("%s?arch=%s&distro=debian-13&upstream=%s",
			purl("deb/debian/"+p.Package, p.Version.String()), p.Architecture.String(), url.QueryEscape(origin)))
	}
	var out bytes.Buffer
	err = spdxjson.Write(doc, &out, spdxjson.Indent("  "))
	return out.Bytes(), err
}

// purl returns a package URL.
func purl(path, version string) string {
	return "pkg:" + strings.ReplaceAll(path, "+", "%2B") + "@" + strings.ReplaceAll(url.PathEscape(version), "+", "%2B")
}
