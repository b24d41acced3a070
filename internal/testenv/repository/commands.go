package repository

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Commands returns a block of shell commands of a page, such as deploy/README.md, for a test that
// runs them. A comment before the block names it:
//
//	<!-- name: run by the test -->
func Commands(page, name string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		return "", err
	}
	_, after, found := strings.Cut(string(text), "\n<!-- "+name+": ")
	comment, block, opened := strings.Cut(after, " -->\n```sh\n")
	block, _, closed := strings.Cut(block, "```\n")
	if !found || !opened || !closed || strings.Contains(comment, "\n") {
		return "", fmt.Errorf("%s has no block of commands after a comment <!-- %s: … -->", page, name)
	}
	return block, nil
}
