package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// typeName is nft's name of the type of a key or of data.
func typeName(fields []nft.Field, addrLen int) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		switch f {
		case nft.Addr:
			names[i] = "ipv4_addr"
			if addrLen == 16 {
				names[i] = "ipv6_addr"
			}
		case nft.Proto:
			names[i] = "inet_proto"
		case nft.Port:
			names[i] = "inet_service"
		case nft.Mark:
			names[i] = "mark"
		case nft.Verdict:
			names[i] = "verdict"
		}
	}
	return strings.Join(names, " . ")
}

// fieldsText prints concatenated fields as nft does. With a last key it prints the range as
// a prefix.
func fieldsText(fields []nft.Field, addrLen int, first, last []byte) string {
	var parts []string
	for _, f := range fields {
		n := (f.Len(addrLen) + 3) &^ 3
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

func fieldText(f nft.Field, b []byte) string {
	switch f {
	case nft.Addr:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case nft.Proto:
		return strings.ToLower(desired.Protocol(b[0]).String())
	case nft.Port:
		return strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	case nft.Mark:
		return fmt.Sprintf("%#08x", binary.NativeEndian.Uint32(b))
	case nft.Verdict:
		return "goto"
	default:
		return ""
	}
}

func rangeText(f nft.Field, first, last []byte) string {
	if f != nft.Addr || string(first) == string(last) {
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
		e := nft.ParseElement(item)
		text := fieldsText(s.key, addrLen, e.Key, e.KeyEnd)
		if s.data != nil {
			text += " : " + fieldsText(s.data, addrLen, e.Data, nil)
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
