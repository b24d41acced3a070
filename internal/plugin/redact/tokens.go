package redact

import (
	"regexp"
	"slices"
	"strings"
)

// tokenForm is what tokens of some issuers look like, whatever is before them.
type tokenForm struct {
	// hints are as those of a rule.
	hints   []string
	pattern *regexp.Regexp
}

// tokenForms are the forms that issuers document, so that their tokens are found in logs. Others of
// a similar form are found by looksIssued.
var tokenForms = []tokenForm{
	{
		[]string{
			"gl", "gh", "github_pat_", "npm_", "pypi-", "rubygems_", "dckr_", "do", "hf_", "lin_api_", "sntry", "shp", "sk", "rk", "pul-", "pmak-", "nrak-",
			"tskey-", "sgp_", "fm", "fo1_", "pscale_", "pnu_", "rdme_", "ico-", "pplx-", "xkeysib-", "duffel_", "shippo_", "clojars_", "dapi", "p8e-", "gocspx-", "akcp",
		},
		regexp.MustCompile(`\b(?:(?:gl[a-z]{2,6}|pul|PMAK|NRAK|tskey-[a-z]+|sk(?:-[a-z]+(?:\d+-)?)?|pypi|ico|pplx|xkeysib|p8e|GOCSPX)-|` +
			`(?:gh[a-z]|github_pat|npm|rubygems|dckr_[a-z]+|do[a-z]_v\d|hf|lin_api|sntry[a-z]|shp[a-z]{2}|[sr]k_(?:live|test|prod)|gl[a-z]{1,2}|sgp|fm\d[a-z]?|fo\d|` +
			`pscale_[a-z]+|pnu|rdme|duffel_[a-z]+|shippo_[a-z]+|(?i:clojars))_|dapi|AKCp)[\w\-]{16,}(?:\.[\w\-]+)*`),
	},
	{
		[]string{"hv", "ya29.", "sg.", "dp.", "dt0c01.", ".atlasv1.", "sha256~", "xox", "xapp-"},
		regexp.MustCompile(`\b(?:(?:hv[a-z]|ya29|SG|dp\.[a-z]{2}|dt0c01|\w{10,20}\.atlasv1)\.[\w\-.=]{16,}|sha256~[\w\-]{20,}|(?:xox[a-z]|xapp)[.\-][\w\-.]{10,})`),
	},
	{
		[]string{"akia", "asia", "abia", "acca", "absk", "aiza", "ltai", "eaa", "atatt3", "1//0", "q~", ":aa", "age-secret-key-"},
		regexp.MustCompile(`\b(?:(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b|ABSK[\w+/]{60,}=*|AIza[\w\-]{30,}|LTAI\w{16,}|EAA[A-Z][\w\-]{22,}|ATATT3[\w\-=]{60,}|` +
			`1//0[\w\-]{30,}|\d{8,10}:AA[\w\-]{30,}|AGE-SECRET-KEY-1\w{20,}|[\w~.]{3}\dQ~[\w~.\-]{31,})`),
	},
}

// minToken is the length of the shortest word that may be or contain a token.
const minToken = 18

// withoutTokens leaves out words that are tokens by their form.
func withoutTokens(s string) string {
	var out strings.Builder
	done := 0
	for i := 0; i < len(s); i++ {
		if !isTokenByte(s[i]) || i > 0 && s[i-1] == '\\' && strings.IndexByte("nrt", s[i]) >= 0 {
			continue // n is not a part of the word after an escaped end of line in a string
		}
		begin := i
		for i < len(s) && isTokenByte(s[i]) {
			i++
		}
		if i-begin < minToken {
			continue
		}
		word := s[begin:i]
		lower := lowered(word)
		for _, form := range tokenForms {
			if slices.ContainsFunc(form.hints, func(hint string) bool { return strings.Contains(lower, hint) }) {
				word = form.pattern.ReplaceAllString(word, LeftOut)
			}
		}
		if len(word) != i-begin {
			out.WriteString(s[done:begin] + word)
			done = i
		}
	}
	out.WriteString(s[done:])
	return withoutIssued(out.String())
}

// isTokenByte reports whether a byte can be in a token of one of the forms.
func isTokenByte(c byte) bool { return isEncoded(c) || strings.IndexByte(".~:=", c) >= 0 }

// minIssued is how long the random part of a token of an unknown issuer is at least.
const minIssued = 30

// withoutIssued leaves out tokens of the form that issuers give theirs so that scanners find them:
// a word of the issuer, and a long random part of capital letters, small letters and digits. Names
// in Kubernetes have no capital letters.
func withoutIssued(s string) string {
	isWord := func(c byte) bool { return isLetter(c) || '0' <= c && c <= '9' }
	var out strings.Builder
	done := 0
	for i := 0; i < len(s); i++ {
		if !isWord(s[i]) {
			continue
		}
		begin := i
		var small, capital, digit bool
		for ; i < len(s) && isWord(s[i]); i++ {
			small = small || 'a' <= s[i] && s[i] <= 'z'
			capital = capital || 'A' <= s[i] && s[i] <= 'Z'
			digit = digit || '0' <= s[i] && s[i] <= '9'
		}
		joined := begin > done+1 && (s[begin-1] == '_' || s[begin-1] == '-') && isWord(s[begin-2])
		if !joined || i-begin < minIssued || !small || !capital || !digit || !looksRandom(s[begin:i]) {
			continue
		}
		for begin > done && (isWord(s[begin-1]) || s[begin-1] == '_' || s[begin-1] == '-') {
			begin--
		}
		out.WriteString(s[done:begin] + LeftOut)
		done = i
	}
	out.WriteString(s[done:])
	return out.String()
}
