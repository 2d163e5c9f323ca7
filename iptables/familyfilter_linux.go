package iptables

import (
	"encoding/binary"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// familyFilter returns a socket filter for notifications of nf_tables. It keeps packets with
// messages about tables, chains and rules of an IP family, or with the end of a transaction,
// which has no family. Otherwise writes of the other family, or sets of another program,
// could fill the buffer.
//
// A packet holds several messages. Classic BPF has no loops, so the filter checks a fixed
// number of messages and keeps packets with more. A load beyond the end of the packet ends
// the program and drops the packet.
func familyFilter(family uint8) []bpf.Instruction {
	const (
		messages   = 32
		familyAt   = unix.NLMSG_HDRLEN // the first byte of struct nfgenmsg
		size, here = 0, 1
	)
	low, high, kind := uint32(0), uint32(1), uint32(4) // bytes of the length and the type
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		low, high, kind = 3, 2, 5
	}
	keep := bpf.RetConstant{Val: ^uint32(0)}
	program := []bpf.Instruction{bpf.LoadConstant{Dst: bpf.RegX}}
	for range messages {
		program = append(program, []bpf.Instruction{
			bpf.LoadIndirect{Off: familyAt, Size: 1},
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.NFPROTO_UNSPEC, SkipTrue: 1},
			keep,
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(family), SkipTrue: 3},
			bpf.LoadIndirect{Off: kind, Size: 1},
			bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: unix.NFT_MSG_DELRULE, SkipTrue: 1},
			keep,

			bpf.LoadIndirect{Off: high, Size: 1},
			bpf.ALUOpConstant{Op: bpf.ALUOpShiftLeft, Val: 8},
			bpf.StoreScratch{Src: bpf.RegA, N: size},
			bpf.LoadIndirect{Off: low, Size: 1},
			bpf.StoreScratch{Src: bpf.RegX, N: here},
			bpf.LoadScratch{Dst: bpf.RegX, N: size},
			bpf.ALUOpX{Op: bpf.ALUOpAdd},
			bpf.ALUOpConstant{Op: bpf.ALUOpAdd, Val: unix.NLMSG_ALIGNTO - 1},
			bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: ^uint32(unix.NLMSG_ALIGNTO - 1)},
			bpf.LoadScratch{Dst: bpf.RegX, N: here},
			bpf.ALUOpX{Op: bpf.ALUOpAdd},
			bpf.TAX{},
		}...)
	}
	return append(program, keep)
}
