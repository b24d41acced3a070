package nft

import (
	"encoding/hex"
	"fmt"
	"io"
	"reflect"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// Dump writes everything that nf_tables holds in this network namespace as text, for people: the
// tables of all programs with their chains, rules, sets and elements. The text is not in the
// language of the command nft, but shows the expressions and values that the kernel holds. What
// changes meanwhile may be missing, or be there twice. An error of out ends it.
func Dump(out io.Writer) error {
	return with(func(c *Conn) error {
		d := &dump{conn: c, out: out}
		d.objects(unix.NFT_MSG_GETTABLE, "table", nil, func(family byte, a []byte) {
			d.printf("table %s %q %s\n", familyName(family), text(a, unix.NFTA_TABLE_NAME), d.rest(a, unix.NFTA_TABLE_NAME))
		})
		d.objects(unix.NFT_MSG_GETCHAIN, "chain", nil, func(family byte, a []byte) {
			d.printf("chain %s %q %q %+v %s\n", familyName(family), text(a, unix.NFTA_CHAIN_TABLE), text(a, unix.NFTA_CHAIN_NAME),
				hookOf(a), d.rest(a, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, unix.NFTA_CHAIN_HOOK))
		})
		d.objects(unix.NFT_MSG_GETRULE, "rule", nil, func(family byte, a []byte) {
			d.printf("rule %s %q %q %s\n", familyName(family), text(a, unix.NFTA_RULE_TABLE), text(a, unix.NFTA_RULE_CHAIN),
				d.rest(a, unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN, unix.NFTA_RULE_EXPRESSIONS, unix.NFTA_RULE_COMPAT))
			for _, e := range netlink.Attributes(netlink.Attribute(a, unix.NFTA_RULE_EXPRESSIONS)) {
				d.printf("\t%s\n", expressionText(family, e))
			}
		})
		var sets []setName
		d.objects(unix.NFT_MSG_GETSET, "set", nil, func(family byte, a []byte) {
			s := setName{family, text(a, unix.NFTA_SET_TABLE), text(a, unix.NFTA_SET_NAME)}
			sets = append(sets, s)
			d.printf("set %s %q %q %s\n", familyName(family), s.table, s.name, d.rest(a, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME))
		})
		for _, s := range sets {
			d.elements(s)
		}
		return d.err
	})
}

// setName identifies a set.
type setName struct {
	family      byte
	table, name string
}

// dump writes what the kernel holds.
type dump struct {
	conn *Conn
	out  io.Writer
	err  error // the first error; nothing is written after it
}

func (d *dump) printf(format string, args ...any) {
	if d.err == nil {
		_, d.err = fmt.Fprintf(d.out, format, args...)
	}
}

// objects calls each with the attributes of every object of all families. A kernel without
// nf_tables has none.
func (d *dump) objects(kind uint16, what string, of *setName, each func(family byte, attributes []byte)) {
	if d.err != nil {
		return
	}
	w := request(kind, unix.NFPROTO_UNSPEC)
	if of != nil {
		w = requestOf(kind, Table{Family{Number: of.family}, of.table}, unix.NFTA_SET_ELEM_LIST_SET, of.name)
	}
	err := d.conn.Dump(w, func(m netlink.Message) {
		if len(m.Body) >= genLen {
			each(m.Body[0], m.Attributes(genLen))
		}
	})
	if err != nil && !isAny(err, lacking...) {
		d.printf("%s: %v\n", what, reading(err))
	}
}

func (d *dump) elements(s setName) {
	d.printf("elements %s %q %q\n", familyName(s.family), s.table, s.name)
	d.objects(unix.NFT_MSG_GETSETELEM, "elements", &s, func(_ byte, a []byte) {
		for _, b := range netlink.Attributes(netlink.Attribute(a, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			e := elementOf(b)
			line, but := "\t"+hex.EncodeToString(e.Key), []uint16{unix.NFTA_SET_ELEM_KEY, elementKeyEnd, unix.NFTA_SET_ELEM_DATA}
			if e.End != nil {
				line += "-" + hex.EncodeToString(e.End)
			}
			if e.Data != nil {
				line += " : " + hex.EncodeToString(e.Data)
			}
			if e.Chain != "" {
				line += fmt.Sprintf(" : goto %q", e.Chain)
			}
			if e.Data == nil && e.Chain == "" { // another verdict, or none
				but = but[:2]
			}
			d.printf("%s %s\n", line, d.rest(b, but...))
		}
	})
}

// rest returns the attributes that the caller does not print itself, as numbers of their kinds with
// their content in hexadecimal digits.
func (d *dump) rest(attributes []byte, but ...uint16) string {
	var out []string
	for kind, content := range netlink.Attributes(attributes) {
		printed := false
		for _, b := range but {
			printed = printed || b == kind
		}
		if !printed {
			out = append(out, fmt.Sprintf("%d=%x", kind, content))
		}
	}
	return "[" + strings.Join(out, " ") + "]"
}

func text(attributes []byte, kind uint16) string {
	return netlink.Text(netlink.Attribute(attributes, kind))
}

func familyName(family byte) string {
	switch family {
	case unix.NFPROTO_INET:
		return "inet"
	case unix.NFPROTO_IPV4:
		return "ip"
	case unix.NFPROTO_IPV6:
		return "ip6"
	case unix.NFPROTO_ARP:
		return "arp"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	case unix.NFPROTO_NETDEV:
		return "netdev"
	}
	return fmt.Sprint("family-", family)
}

// expressionTypes make the expressions that can be decoded, by the kernel's names.
var expressionTypes = map[string]func() expr.Any{
	"bitwise": func() expr.Any { return &expr.Bitwise{} }, "cmp": func() expr.Any { return &expr.Cmp{} },
	"counter": func() expr.Any { return &expr.Counter{} }, "ct": func() expr.Any { return &expr.Ct{} },
	"dynset": func() expr.Any { return &expr.Dynset{} }, "fib": func() expr.Any { return &expr.Fib{} },
	"immediate": func() expr.Any { return &expr.Immediate{} }, "limit": func() expr.Any { return &expr.Limit{} },
	"lookup": func() expr.Any { return &expr.Lookup{} }, "masq": func() expr.Any { return &expr.Masq{} },
	"meta": func() expr.Any { return &expr.Meta{} }, "nat": func() expr.Any { return &expr.NAT{} },
	"numgen": func() expr.Any { return &expr.Numgen{} }, "objref": func() expr.Any { return &expr.Objref{} },
	"payload": func() expr.Any { return &expr.Payload{} }, "range": func() expr.Any { return &expr.Range{} },
	"redir": func() expr.Any { return &expr.Redir{} }, "reject": func() expr.Any { return &expr.Reject{} },
}

// expressionText returns an expression with its fields. If it cannot be decoded, its content is in
// hexadecimal digits.
func expressionText(family byte, e []byte) string {
	name, data := text(e, unix.NFTA_EXPR_NAME), netlink.Attribute(e, unix.NFTA_EXPR_DATA)
	if name == "immediate" { // a verdict is another type
		verdict := &expr.Verdict{}
		into := netlink.Attribute(data, unix.NFTA_IMMEDIATE_DREG)
		if netlink.BigUint32(into) == unix.NFT_REG_VERDICT && expr.Unmarshal(family, data, verdict) == nil {
			return fmt.Sprintf("verdict{Kind=%d Chain=%q}", verdict.Kind, verdict.Chain)
		}
	}
	if newExpression, ok := expressionTypes[name]; ok {
		if decoded := newExpression(); expr.Unmarshal(family, data, decoded) == nil {
			return name + fieldsText(decoded)
		}
	}
	return fmt.Sprintf("%s{%x}", strings.Map(printable, name), data)
}

// printable maps what could break a line to a blank.
func printable(r rune) rune {
	if r < ' ' || r == 0x7f {
		return ' '
	}
	return r
}

// fieldsText returns the fields of an expression that are not zero.
func fieldsText(e expr.Any) string {
	value := reflect.ValueOf(e).Elem()
	var out []string
	for i := range value.NumField() {
		f := value.Field(i)
		if f.IsZero() || !f.CanInterface() {
			continue
		}
		content := fmt.Sprintf("%+v", f.Interface())
		switch v := f.Interface().(type) {
		case []byte:
			content = hex.EncodeToString(v)
		case string:
			content = fmt.Sprintf("%q", v)
		case []expr.Any:
			content = fmt.Sprint(len(v), " expressions")
		}
		out = append(out, value.Type().Field(i).Name+"="+content)
	}
	return "{" + strings.Join(out, " ") + "}"
}
