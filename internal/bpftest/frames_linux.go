package bpftest

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// Frames are frames of a UDP datagram over IPv4, which come into a device as if from the wire.
type Frames struct {
	device  Device
	index   int // of the device
	program *ebpf.Program
	context []byte
	frame   []byte
}

// Device is a device of a network namespace in which Doer calls functions.
type Device struct {
	Doer interface{ Do(f func() error) error }
	Name string
}

// NewFrames returns frames for a device. With everyFlow, each has a random source port, and a random
// address in the source's /16, whose low half must be 0: it begins another flow.
func NewFrames(tb testing.TB, device Device, from, to netip.AddrPort, everyFlow bool) *Frames {
	tb.Helper()
	f := &Frames{device: device, context: make([]byte, 24)} // struct xdp_md
	netnstest.Check(tb, device.Doer.Do(func() error {
		found, err := net.InterfaceByName(device.Name)
		if err != nil {
			return err
		}
		f.index = found.Index
		f.frame = append(f.frame, found.HardwareAddr...)
		return nil
	}))
	f.frame = append(f.frame, 2, 0, 0, 0, 0, 1, 8, 0)
	const payload = 22
	ip := append([]byte{0x45, 0, 0, 20 + 8 + payload, 0, 0, 0x40, 0, 64, 17, 0, 0}, from.Addr().AsSlice()...)
	ip = append(ip, to.Addr().AsSlice()...)
	var sum uint32
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	f.frame = append(f.frame, ip...)
	f.frame = binary.BigEndian.AppendUint16(f.frame, from.Port())
	f.frame = binary.BigEndian.AppendUint16(f.frame, to.Port())
	f.frame = binary.BigEndian.AppendUint16(f.frame, 8+payload)
	f.frame = append(f.frame, make([]byte, 2+payload)...) // no checksum
	binary.NativeEndian.PutUint32(f.context[4:], uint32(len(f.frame)))
	binary.NativeEndian.PutUint32(f.context[12:], uint32(f.index))
	f.load(tb, everyFlow)
	return f
}

// load makes the program that restores the headers, since the kernel uses the pages again, and passes the frame.
func (f *Frames) load(tb testing.TB, everyFlow bool) {
	tb.Helper()
	const header, id, address, port = 44, 18, 28, 34
	code := asm.Instructions{
		asm.LoadMem(asm.R6, asm.R1, 0, asm.Word), asm.LoadMem(asm.R3, asm.R1, 4, asm.Word),
		asm.Mov.Reg(asm.R4, asm.R6), asm.Add.Imm(asm.R4, header), asm.JGT.Reg(asm.R4, asm.R3, "out"),
	}
	for i := 0; i < header; i += 4 {
		code = append(code, asm.StoreImm(asm.R6, int16(i), int64(int32(binary.NativeEndian.Uint32(f.frame[i:]))), asm.Word))
	}
	if everyFlow {
		code = append(code, asm.FnGetPrandomU32.Call(), asm.StoreMem(asm.R6, port, asm.R0, asm.Half), asm.RSh.Imm(asm.R0, 16),
			asm.StoreMem(asm.R6, address, asm.R0, asm.Half),
			asm.Xor.Imm(asm.R0, 0xffff), asm.StoreMem(asm.R6, id, asm.R0, asm.Half)) // the sum of the header stays
	}
	code = append(code, asm.Mov.Imm(asm.R0, 2).WithSymbol("out"), asm.Return()) // XDP_PASS
	f.program = program(tb, ebpf.XDP, code)
}

func program(tb testing.TB, kind ebpf.ProgramType, code asm.Instructions) *ebpf.Program {
	tb.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: kind, License: "MIT", Instructions: code})
	netnstest.Check(tb, err)
	tb.Cleanup(func() { _ = bpfx.Close(p) })
	return p
}

// DropAtOnce drops each packet at the device until the test ends.
func (f *Frames) DropAtOnce(tb testing.TB) {
	tb.Helper()
	f.Attach(tb, program(tb, ebpf.SchedCLS, asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}))
}

// Attach attaches a program at ingress of the device until the test ends.
func (f *Frames) Attach(tb testing.TB, p *ebpf.Program) {
	tb.Helper()
	netnstest.Check(tb, f.device.Doer.Do(func() error {
		one, err := link.AttachTCX(link.TCXOptions{Interface: f.index, Program: p, Attach: ebpf.AttachTCXIngress})
		if err == nil {
			tb.Cleanup(func() { _ = bpfx.Close(one) })
		}
		return err
	}))
}

// Send puts n frames into the device, and returns nanoseconds of each. A call ends with a tick of the
// kernel's clock, up to 4 ms late.
func (f *Frames) Send(tb testing.TB, n uint32) (ns float64) {
	tb.Helper()
	const liveFrames = 1 << 1 // BPF_F_TEST_XDP_LIVE_FRAMES
	netnstest.Check(tb, f.device.Doer.Do(func() error {
		start := time.Now()
		_, err := f.program.Run(&ebpf.RunOptions{Data: f.frame, Context: f.context, Repeat: n, Flags: liveFrames})
		ns = float64(time.Since(start).Nanoseconds()) / float64(n)
		return err
	}))
	return ns
}
