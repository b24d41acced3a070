// Package jwt reads what a Kubernetes ServiceAccount's token says of itself, without verifying it: enough to know that a review
// could only say no, never enough to trust it.
package jwt

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
)

// maxSize bounds tokens, in bytes: those of ServiceAccounts have about one thousand.
const maxSize = 16 << 10

// Claims are what a token says of itself: RFC 7519, and Kubernetes' own (KEP-1205, KEP-4193).
type Claims struct {
	Subject    string    `json:"sub"`
	Audiences  oneOrMore `json:"aud"`
	Expires    float64   `json:"exp"` // seconds since 1970; 0: not said, which no ServiceAccount's token does
	Kubernetes struct {
		Node struct {
			Name string `json:"name"` // of the node that the token's Pod is on; "": not said
		} `json:"node"`
	} `json:"kubernetes.io"`
}

// oneOrMore strings: a list, or one by itself.
type oneOrMore []string

// UnmarshalJSON implements json.Unmarshaler.
func (o *oneOrMore) UnmarshalJSON(b []byte) error {
	var one string
	if json.Unmarshal(b, &one) == nil {
		*o = oneOrMore{one}
		return nil
	}
	return json.Unmarshal(b, (*[]string)(o))
}

// Parse reads a token; false if it is none.
func Parse(token string) (c Claims, ok bool) {
	parts := strings.Split(token, ".")
	if len(token) > maxSize || len(parts) != 3 {
		return Claims{}, false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil || json.Unmarshal(payload, &c) != nil {
		return Claims{}, false
	}
	return c, true
}

// Expired tells whether the token was no longer good at that time.
func (c *Claims) Expired(at time.Time) bool { return float64(at.Unix()) > c.Expires }

// Until is when the token expires.
func (c *Claims) Until() time.Time { return time.Unix(int64(min(c.Expires, 1<<40)), 0) }
