// Package procstat reads from /proc what a process and the whole machine use.
package procstat

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of the times in /proc: USER_HZ is 100 on every
// architecture that Linux runs Go on.
const tick = 10 * time.Millisecond

// CPU is the CPU time, user and system, of the processes and of those that they started and
// that have ended. It includes the kernel's work on packets in their context, but not the
// kernel's other work on packets.
func CPU(pids []int) (time.Duration, error) {
	var sum time.Duration
	for _, pid := range pids {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, err
		}
		t, err := parseStat(data)
		if err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		sum += t
	}
	return sum, nil
}

// parseStat adds fields 14 to 17: utime, stime, cutime and cstime. Field 2, the name, may
// contain spaces and parentheses: count from the last one.
func parseStat(data []byte) (time.Duration, error) {
	end := bytes.LastIndexByte(data, ')')
	if end < 0 {
		return 0, errors.New("no name")
	}
	fields := bytes.Fields(data[end+1:])
	const first, after = 11, 15
	if len(fields) < after {
		return 0, errors.New("too few fields")
	}
	var sum int64
	for _, field := range fields[first:after] {
		n, err := strconv.ParseInt(string(field), 10, 64)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return time.Duration(sum) * tick, nil
}

// Machine is the CPU time of all cores together since the boot.
type Machine struct {
	Busy  time.Duration // user, nice, system, interrupts
	Steal time.Duration // taken by the hypervisor
}

// Sub returns the difference to an earlier reading.
func (m Machine) Sub(earlier Machine) Machine {
	return Machine{m.Busy - earlier.Busy, m.Steal - earlier.Steal}
}

// ReadMachine reads /proc/stat.
func ReadMachine() (Machine, error) {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return Machine{}, err
	}
	return parseMachine(data)
}

func parseMachine(data []byte) (Machine, error) {
	line, _, _ := bytes.Cut(data, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 9 || fields[0] != "cpu" {
		return Machine{}, errors.New("/proc/stat: no cpu line")
	}
	var v [8]time.Duration // user nice system idle iowait irq softirq steal
	for i := range v {
		n, err := strconv.ParseInt(fields[i+1], 10, 64)
		if err != nil {
			return Machine{}, fmt.Errorf("/proc/stat: %w", err)
		}
		v[i] = time.Duration(n) * tick
	}
	return Machine{Busy: v[0] + v[1] + v[2] + v[5] + v[6], Steal: v[7]}, nil
}

// Memory is the processes' own memory, in bytes. Socket and pipe buffers belong to
// the kernel and are not included.
type Memory struct {
	RSS int64 // resident, shared pages counted in each process
	PSS int64 // resident, shared pages divided among those that share them
}

// ReadMemory adds up the processes' smaps_rollup.
func ReadMemory(pids []int) (Memory, error) {
	var sum Memory
	for _, pid := range pids {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return Memory{}, err
		}
		m := parseSmaps(string(data))
		sum.RSS += m.RSS
		sum.PSS += m.PSS
	}
	return sum, nil
}

func parseSmaps(data string) Memory {
	var m Memory
	for line := range strings.Lines(data) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kib, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			continue
		}
		switch fields[0] {
		case "Rss:":
			m.RSS = kib << 10
		case "Pss:":
			m.PSS = kib << 10
		}
	}
	return m
}

// Descriptors counts the processes' open files.
func Descriptors(pids []int) (int, error) {
	sum := 0
	for _, pid := range pids {
		n, err := countDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// Threads counts the processes' threads.
func Threads(pids []int) (int, error) {
	sum := 0
	for _, pid := range pids {
		n, err := countDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func countDir(name string) (int, error) {
	dir, err := os.Open(name)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return 0, err
	}
	return len(names), nil
}

// Tree returns a process and all its descendants, in order.
func Tree(root int) ([]int, error) {
	all := []int{root}
	for i := 0; i < len(all); i++ {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", all[i]))
		if err != nil {
			return nil, err
		}
		for _, task := range tasks {
			data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", all[i], task.Name()))
			if err != nil {
				return nil, err
			}
			for _, word := range strings.Fields(string(data)) {
				pid, err := strconv.Atoi(word)
				if err != nil {
					return nil, fmt.Errorf("children of %d: %w", all[i], err)
				}
				all = append(all, pid)
			}
		}
	}
	slices.Sort(all)
	return all, nil
}
