// Package logtest keeps logs and other output in memory, for tests that read them while they are
// written.
package logtest

import (
	"bytes"
	"strings"
	"sync"
)

// Buffer keeps what is written to it. It is empty at first, and any goroutine may use it.
type Buffer struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

// Write implements io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

// String returns everything that was written so far.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Count returns how many lines contain all of the texts.
func (b *Buffer) Count(texts ...string) (n int) {
	for line := range strings.Lines(b.String()) {
		all := true
		for _, text := range texts {
			all = all && strings.Contains(line, text)
		}
		if all {
			n++
		}
	}
	return n
}
