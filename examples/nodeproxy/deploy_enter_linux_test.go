package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// TestBecomeAContainer is no test of its own: it is how a process that box.start has
// started becomes a container.
func TestBecomeAContainer(*testing.T) {
	text := os.Getenv(boxVariable)
	if text == "" {
		return
	}
	runtime.LockOSThread()       // rights are a thread's
	unix.CloseOnExec(complaints) // so box.start learns that there are none
	report := os.NewFile(complaints, "complaints")
	var b box
	err := json.Unmarshal([]byte(text), &b)
	if err == nil {
		err = b.enter()
	}
	fmt.Fprint(report, err)
	os.Exit(1)
}

// complaints is the descriptor for what goes wrong before the program of the
// container runs.
const complaints = 3

// enter mounts, gives up all rights but the box's, and turns into its program.
func (b *box) enter() error {
	if err := b.mount(); err != nil {
		return err
	}
	if err := b.confine(); err != nil {
		return err
	}
	return fmt.Errorf("execute %s: %w", b.Command[0], syscall.Exec(b.Command[0], b.Command, b.Environment))
}

// harmless is what files of others are mounted with.
const harmless = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// mount makes the box's root that of the process, with what runtimes mount into it.
func (b *box) mount() error {
	errs := []error{
		mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE), // nobody else is to see the others
		mount(b.Root, b.Root, "", unix.MS_BIND),
		mount("proc", filepath.Join(b.Root, "proc"), "proc", harmless),
		mount("sysfs", filepath.Join(b.Root, "sys"), "sysfs", harmless|unix.MS_RDONLY),
	}
	for _, place := range []string{"bus", "fs", "irq", "sys", "sysrq-trigger"} {
		place = filepath.Join(b.Root, "proc", place)
		if err := readOnly(place, place, harmless); !errors.Is(err, fs.ErrNotExist) { // not every kernel has all
			errs = append(errs, err)
		}
	}
	for place, source := range b.Binds {
		errs = append(errs, readOnly(source, filepath.Join(b.Root, place), unix.MS_NOSUID|unix.MS_NOEXEC))
	}
	if b.ReadOnlyRoot {
		errs = append(errs, mount("", b.Root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := unix.Chdir(b.Root); err != nil {
		return fmt.Errorf("enter root: %w", err)
	}
	if err := errors.Join(mount(".", "/", "", unix.MS_MOVE), unix.Chroot("."), unix.Chdir("/")); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	return nil
}

func mount(source, target, kind string, flags uintptr) error {
	if err := unix.Mount(source, target, kind, flags, ""); err != nil {
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return nil
}

// readOnly mounts a file or a directory somewhere, in the two steps that it takes.
func readOnly(source, target string, flags uintptr) error {
	if err := mount(source, target, "", unix.MS_BIND); err != nil {
		return err
	}
	return mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|flags)
}

// confine gives up rights of the thread. The program of user 0 that it executes gets
// what is left in the bounding set.
func (b *box) confine() error {
	set := capabilitySet(b.Capabilities)
	for c := uintptr(0); ; c++ {
		if _, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err != nil {
			break // the kernel knows no more
		}
		if set&(1<<c) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if b.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("renounce privileges: %w", err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	low, high := uint32(set), uint32(set>>32)
	sets := [2]unix.CapUserData{{Effective: low, Permitted: low}, {Effective: high, Permitted: high}}
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	if !b.DefaultSeccomp {
		return nil
	}
	return forbidSystemCalls()
}

// capabilityNames are those of linux/capability.h, in their order.
const capabilityNames = `CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE
SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND
AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`

// capabilitySet has the bits of capabilities, and all of them for a name that is none.
func capabilitySet(names []v1.Capability) (set uint64) {
	known := strings.Fields(capabilityNames)
	for _, name := range names {
		i := slices.Index(known, string(name))
		if i < 0 {
			return ^uint64(0)
		}
		set |= 1 << i
	}
	return set
}

// forbidden are the system calls that container runtimes refuse to whom has no more
// capabilities than CAP_NET_ADMIN, on every machine that Go knows as 64-bit.
func forbidden() []uint32 {
	return []uint32{
		unix.SYS_ACCT, unix.SYS_ADD_KEY, unix.SYS_BPF, unix.SYS_CHROOT, unix.SYS_CLOCK_SETTIME, unix.SYS_DELETE_MODULE, unix.SYS_FANOTIFY_INIT,
		unix.SYS_FINIT_MODULE, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSOPEN, unix.SYS_FSPICK, unix.SYS_GET_MEMPOLICY, unix.SYS_INIT_MODULE,
		unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER, unix.SYS_IO_URING_SETUP, unix.SYS_KCMP, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_KEXEC_LOAD,
		unix.SYS_KEYCTL, unix.SYS_LOOKUP_DCOOKIE, unix.SYS_MBIND, unix.SYS_MIGRATE_PAGES, unix.SYS_MOUNT, unix.SYS_MOUNT_SETATTR, unix.SYS_MOVE_MOUNT,
		unix.SYS_MOVE_PAGES, unix.SYS_NFSSERVCTL, unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_OPEN_TREE, unix.SYS_PERF_EVENT_OPEN, unix.SYS_PIDFD_GETFD,
		unix.SYS_PIVOT_ROOT, unix.SYS_PROCESS_MADVISE, unix.SYS_QUOTACTL, unix.SYS_REBOOT, unix.SYS_REQUEST_KEY, unix.SYS_SET_MEMPOLICY,
		unix.SYS_SETDOMAINNAME, unix.SYS_SETHOSTNAME, unix.SYS_SETNS, unix.SYS_SETTIMEOFDAY, unix.SYS_SWAPOFF, unix.SYS_SWAPON, unix.SYS_SYSLOG,
		unix.SYS_UMOUNT2, unix.SYS_UNSHARE, unix.SYS_USERFAULTFD, unix.SYS_VHANGUP,
	}
}

// Offsets in struct seccomp_data of linux/seccomp.h, on little-endian machines.
const (
	callNumber    = 0
	firstArgument = 16
)

// newNamespaces are the flags of clone(2) that runtimes refuse.
const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// forbidSystemCalls is stricter than a runtime: a call that it would refuse ends the
// process, so that a test cannot overlook it. clone3 is not there, as with a runtime.
func forbidSystemCalls() error {
	kill := bpf.RetConstant{Val: unix.SECCOMP_RET_KILL_PROCESS}
	program := []bpf.Instruction{bpf.LoadAbsolute{Off: callNumber, Size: 4}}
	for _, call := range forbidden() {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: call, SkipTrue: 1}, kill)
	}
	program = append(program,
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_CLONE3, SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_CLONE, SkipTrue: 3},
		bpf.LoadAbsolute{Off: firstArgument, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: newNamespaces, SkipTrue: 1},
		kill,
		bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW},
	)
	raw, err := bpf.Assemble(program)
	if err != nil {
		return fmt.Errorf("assemble filter: %w", err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	whole := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&whole)), 0, 0); err != nil {
		return fmt.Errorf("filter system calls: %w", err)
	}
	return nil
}
