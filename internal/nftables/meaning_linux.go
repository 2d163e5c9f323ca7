package nftables

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// acceptPolicy is NF_ACCEPT of linux/netfilter.h, which package unix does not have.
const acceptPolicy = 1

// meaningOfAll is the meaning of a rule of encoded expressions.
func meaningOfAll(exprs [][]byte) string {
	var b []byte
	for _, e := range exprs {
		b = nft.AppendAttr(b, unix.NFTA_LIST_ELEM, e)
	}
	return meaningOf(b)
}

// meaningOf describes the expressions of a rule so that equal rules have equal texts,
// whether the kernel or a program has encoded them: in which order the attributes are, and
// whether one that is 0 is there, makes no difference.
func meaningOf(expressions []byte) string {
	var b strings.Builder
	for _, e := range netlinkx.Attributes(expressions) {
		name := netlinkx.String(netlinkx.Find(e, unix.NFTA_EXPR_NAME))
		values := map[string]string{}
		collectValues(values, name, netlinkx.Find(e, unix.NFTA_EXPR_DATA))
		dropImplied(name, values)
		fmt.Fprintf(&b, "%s(", name)
		for _, k := range slices.Sorted(maps.Keys(values)) {
			fmt.Fprintf(&b, "%s=%s ", k, values[k])
		}
		b.WriteString(")")
	}
	return b.String()
}

// namesOf lists the expressions of a rule of another program.
func namesOf(expressions []byte) string {
	var names []string
	for _, e := range netlinkx.Attributes(expressions) {
		names = append(names, netlinkx.String(netlinkx.Find(e, unix.NFTA_EXPR_NAME)))
	}
	if len(names) == 0 {
		return "a rule without expressions"
	}
	return "a rule with other expressions or values: " + strings.Join(names, ", ")
}

// collectValues adds the attributes that are not 0, by their path.
func collectValues(into map[string]string, path string, attrs []byte) {
	for typ, value := range netlinkx.Attributes(attrs) {
		at := fmt.Sprintf("%s.%d", path, typ)
		switch {
		case at == "dynset.7": // NFTA_DYNSET_EXPR: the values of a counter are no part of the rule
			into[at] = netlinkx.String(netlinkx.Find(value, unix.NFTA_EXPR_NAME))
			if into[at] != "counter" {
				collectValues(into, at+"."+into[at], netlinkx.Find(value, unix.NFTA_EXPR_DATA))
			}
		case isNested(at):
			collectValues(into, at, value)
		case strings.Trim(string(value), "\x00") == "":
		case isRegister(at):
			into[at] = registerText(value)
		default:
			into[at] = hex.EncodeToString(value)
		}
	}
}

// isNested reports whether an attribute of an expression holds data or a verdict. Kernels do
// not mark all of these as nested.
func isNested(path string) bool {
	name, rest, _ := strings.Cut(path, ".")
	var data []string
	switch name {
	case "cmp":
		data = []string{"3"} // NFTA_CMP_DATA
	case "immediate":
		data = []string{"2"} // NFTA_IMMEDIATE_DATA
	case "bitwise":
		data = []string{"4", "5", "7"} // NFTA_BITWISE_MASK, _XOR and _DATA
	}
	top, verdict, below := strings.Cut(rest, ".")
	return slices.Contains(data, top) && (!below || verdict == "2") // NFTA_DATA_VERDICT
}

// isRegister reports whether an attribute of an expression is the number of a register.
func isRegister(path string) bool {
	name, typ, _ := strings.Cut(path, ".")
	return strings.Contains(registerAttributes[name], typ)
}

// registerAttributes are the attributes NFTA_…_SREG and _DREG of the expressions in use.
var registerAttributes = map[string]string{ // read-only
	"bitwise": "12", "byteorder": "12", "cmp": "1", "ct": "14", "dynset": "45", "fib": "1", "hash": "12", "immediate": "1",
	"lookup": "23", "meta": "13", "nat": "3456", "numgen": "1", "payload": "15",
}

// registerText is the number of the first of 4 bytes. The kernel counts a register that
// could be one of 16 bytes as such.
func registerText(value []byte) string {
	n := netlinkx.Uint32(value)
	if n <= 4 { // NFT_REG_1 to NFT_REG_4
		n = reg(0) + 4*(n-1)
	}
	return strconv.Itoa(int(n))
}

// dropImplied deletes what the kernel adds, since it follows from the rest.
func dropImplied(name string, values map[string]string) {
	const minAddr, maxAddr, minPort, maxPort, flags = "nat.3", "nat.4", "nat.5", "nat.6", "nat.7"
	if name != "nat" {
		return
	}
	if values[maxAddr] == values[minAddr] {
		delete(values, maxAddr)
	}
	if values[maxPort] == values[minPort] {
		delete(values, maxPort)
	}
	const mapAddr, mapPort = 1, 2 // NF_NAT_RANGE_MAP_IPS and _PROTO_SPECIFIED
	if b, err := hex.DecodeString(values[flags]); err == nil && len(b) == 4 {
		delete(values, flags)
		if rest := binary.BigEndian.Uint32(b) &^ (mapAddr | mapPort); rest != 0 {
			values[flags] = fmt.Sprint(rest)
		}
	}
}
