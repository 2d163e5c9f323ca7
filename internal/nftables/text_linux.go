package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// typeName is nft's name of the type of a key or of data.
func typeName(fields []field, addrLen int) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		switch f {
		case fieldAddr:
			names[i] = "ipv4_addr"
			if addrLen == 16 {
				names[i] = "ipv6_addr"
			}
		case fieldProto:
			names[i] = "inet_proto"
		case fieldPort:
			names[i] = "inet_service"
		case fieldMark:
			names[i] = "mark"
		case fieldVerdict:
			names[i] = "verdict"
		}
	}
	return strings.Join(names, " . ")
}

// fieldsText prints concatenated fields as nft does. With a last key it prints the range as
// a prefix.
func fieldsText(fields []field, addrLen int, first, last []byte) string {
	var parts []string
	for _, f := range fields {
		n := (fieldLen(f, addrLen) + 3) &^ 3
		if len(first) < n {
			break
		}
		text := fieldText(f, first[:n])
		if len(last) >= n {
			text = rangeText(f, first[:n], last[:n])
			last = last[n:]
		}
		parts = append(parts, text)
		first = first[n:]
	}
	return strings.Join(parts, " . ")
}

func fieldText(f field, b []byte) string {
	switch f {
	case fieldAddr:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case fieldProto:
		return strings.ToLower(desired.Protocol(b[0]).String())
	case fieldPort:
		return strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	case fieldMark:
		return fmt.Sprintf("%#08x", binary.NativeEndian.Uint32(b))
	case fieldVerdict:
		return "goto"
	default:
		return ""
	}
}

func rangeText(f field, first, last []byte) string {
	if f != fieldAddr || string(first) == string(last) {
		return fieldText(f, first)
	}
	a, _ := netip.AddrFromSlice(first)
	z, _ := netip.AddrFromSlice(last)
	for bits := a.BitLen(); bits >= 0; bits-- {
		if p := netip.PrefixFrom(a, bits); lastAddr(p) == z {
			return p.String()
		}
	}
	return a.String() + "-" + z.String()
}

// elementTexts prints the encoded elements of a set.
func elementTexts(s *setSpec, addrLen int, encoded []byte) []string {
	var texts []string
	for _, item := range netlinkx.Attributes(encoded) {
		e := parseElement(item)
		text := fieldsText(s.key, addrLen, e.key, e.keyEnd)
		if s.data != nil {
			text += " : " + fieldsText(s.data, addrLen, e.data, nil)
		}
		texts = append(texts, text)
	}
	return texts
}

func prefixTexts(prefixes []netip.Prefix) []string {
	texts := make([]string, len(prefixes))
	for i, p := range prefixes {
		texts[i] = p.String()
	}
	return texts
}
