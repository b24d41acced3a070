package auth

import "errors"

// tokenError is what is wrong with a token. The token's bearer is told.
type tokenError string

// Error implements error.
func (e tokenError) Error() string { return string(e) }

const (
	// errNoToken means that the text is too long for a token, or has not the form of a signed one.
	errNoToken tokenError = "it is not a signed token"
	// errUnknownKey means that the token names a key that is not among those of the API server,
	// which were read after the token came.
	errUnknownKey tokenError = "it is signed with a key that the API server does not publish"
	// errSignature means that the named key did not sign the token.
	errSignature tokenError = "its signature is invalid"
	// errIssuer means that the token's issuer is neither that of the API server nor an earlier one.
	errIssuer tokenError = "its issuer is not the API server's"
)

// errTooSoon means that a token names an unknown key or issuer, and that the keys were read less
// than keysInterval ago.
var errTooSoon = errors.New("the API server's keys were just read, and the token's key is not among them: try again " +
	"later")
